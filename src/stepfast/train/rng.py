"""All random generators of the process, taken and set together.

User code between restoring and the first step may draw numbers; setting the generators is therefore
the last thing before a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from stepfast.checkpoint.plain import process_rng, set_process_rng


@dataclass(frozen=True, slots=True)
class RngState:
    """Python's, NumPy's (where loaded), torch's and the device's generators at one moment."""

    process: dict[str, Any]
    cpu: torch.Tensor
    cuda: torch.Tensor | None  # of the current device, where CUDA is in use; never run on one

    @staticmethod
    def take() -> RngState:
        """The present state."""
        in_use = torch.cuda.is_initialized()
        cuda = torch.cuda.get_rng_state() if in_use else None
        return RngState(dict(process_rng()), torch.get_rng_state(), cuda)

    def with_device(self) -> RngState:
        """The same, with the device's generator as it is now where it was not there before: taken
        before user code ran, it is what a fresh process begins with. Never run on a GPU.
        """
        if self.cuda is not None or not torch.cuda.is_initialized():
            return self
        return replace(self, cuda=torch.cuda.get_rng_state())

    def apply(self) -> None:
        """Make it the present state."""
        set_process_rng(self.process)
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
