"""What process groups are made of, and where that makes a difference.

Owns: the backend of each kind of device, whether its groups are ended by an abort, the settings
that it has to start with. Does not own: making and aborting groups (`train.groups`), the rules
about the user's settings (`health.accelerator`).

A backend whose groups end by abort runs beside the host: a wait returns before the data are there,
an abort ends what is pending with garbage and without an exception, and errors show late. NCCL's
part has never run: it needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from stepfast.errors import ConfigError
from stepfast.health import accelerator

NO_GROUP = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The groups of a job.

    spec: as torch says it. device: whose part of a group is ended by an abort; NO_GROUP where
    connections are cut instead. settings: of the environment, before the first group is made; a
    setting of the user's that stands against them is refused. defaults: where the user says
    nothing. trace: what was launched so far, as JSON.
    """

    spec: str
    device: torch.device = NO_GROUP
    settings: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    trace: Callable[[], bytes] | None = None

    @property
    def ends_by_abort(self) -> bool:
        """Whether groups run beside the host, and an abort leaves garbage behind."""
        return self.device != NO_GROUP

    def prepare(self, environment: MutableMapping[str, str]) -> None:
        """Put the settings into the environment; ConfigError where the user's contradict them."""
        if not self.settings:
            return
        if refusals := accelerator.refused_settings(environment):
            raise ConfigError("; ".join(refusals))
        environment.update(self.settings)
        for name, value in self.defaults.items():
            environment.setdefault(name, value)


def nccl_trace() -> bytes:
    """NCCL's flight recorder, without stacks, which would take seconds to be named. Never run."""
    dump: Any = c10d._dump_nccl_trace_json  # type: ignore[attr-defined]  # CUDA builds have it
    dumped: bytes = dump(includeCollectives=True, onlyActive=False)
    return dumped


# Only stepfast aborts: torch's watchdog and its monitor would end a process that could go on.
NCCL_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A rank that sees an error would have all others end themselves.
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    # A dump at a time limit is torch's own, and waits for all ranks.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
NCCL_DEFAULTS = {
    "TORCH_FR_BUFFER_SIZE": "2000",  # entries: some dozens of steps
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a look for devices must not initialise CUDA
}
GLOO = Backend(spec="gloo")
NCCL = Backend(
    spec="cpu:gloo,cuda:nccl",
    device=torch.device("cuda"),
    settings=NCCL_SETTINGS,
    defaults=NCCL_DEFAULTS,
    trace=nccl_trace,
)
OF_DEVICE: dict[str, Backend] = {"cpu": GLOO, "cuda": NCCL}
"""By type of device."""
