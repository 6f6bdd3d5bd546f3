"""GPUs judged: what is wrong is named, what could not be asked is unknown, and nothing else is."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stepfast.health import nvml
from stepfast.health.gpus import (
    FABRIC_ABSENT,
    FABRIC_COMPLETED,
    FABRIC_IN_PROGRESS,
    FABRIC_NOT_STARTED,
    Broken,
    Fabric,
    Gpu,
    Links,
    Remapped,
    Unread,
    gpu_count,
    judged,
)
from stepfast.health.verdicts import Finding, Verdict

STAND_IN = Path(__file__).parents[1] / "fakes" / "nvml" / "pynvml.py"
WELL = Gpu(
    index=0,
    name="GPU-0",
    recovery=0,
    remapped=Remapped(1, 0, False, False),
    is_ecc_on=True,
    uncorrected=0,
    is_sram_worn=False,
    links=Links(18, 18),
    fabric=Fabric(FABRIC_COMPLETED, 0),
)


def gpus(count: int = 2, **last: Any) -> list[Gpu]:
    """GPUs that are well, but for the last one."""
    made = [msgspec.structs.replace(WELL, index=n, name=f"GPU-{n}") for n in range(count)]
    made[-1] = msgspec.structs.replace(made[-1], **last)
    return made


def of(check: str, found: list[Finding]) -> Finding:
    (one,) = [f for f in found if f.check == check]
    return one


def test_gpus_that_are_well_are_healthy_in_everything():
    found = judged(gpus(8))
    assert len(found) == 6
    assert {f.verdict for f in found} == {Verdict.HEALTHY}
    assert judged([]) == []


@pytest.mark.parametrize(
    ("check", "changes", "said"),
    [
        ("gpu recovery action", {"recovery": 1}, "the driver asks for: GPU reset"),
        ("gpu recovery action", {"recovery": 3}, "drain P2P"),
        ("gpu recovery action", {"recovery": 99}, "action 99"),
        ("gpu remapped rows", {"remapped": Remapped(0, 1, True, False)}, "waits for a reset"),
        ("gpu remapped rows", {"remapped": Remapped(0, 9, False, True)}, "could not be"),
        ("gpu ecc", {"uncorrected": 2}, "2 uncorrected errors since the last reset"),
        ("gpu sram", {"is_sram_worn": True}, "SRAM"),
        ("gpu nvlink", {"links": Links(17, 18)}, "17 of 18 links up, 18 on another GPU"),
        ("gpu fabric", {"fabric": Fabric(FABRIC_COMPLETED, 999)}, "status 999"),
        ("gpu ecc", {"is_ecc_on": Broken("GPU is lost")}, "GPU is lost"),
    ],
)
def test_one_gpu_that_is_not_well_is_named(check: str, changes: dict[str, Any], said: str):
    found = judged(gpus(8, **changes))
    assert {f.check for f in found if f.verdict is not Verdict.HEALTHY} == {check}
    finding = of(check, found)
    assert finding.verdict is Verdict.UNHEALTHY
    assert said in finding.evidence and "GPU 7 (GPU-7)" in finding.evidence
    assert "GPU 0" not in finding.evidence
    assert finding.change, "what to do about it"


@pytest.mark.parametrize(
    ("check", "changes"),
    [
        ("gpu recovery action", {"recovery": Unread("too old")}),
        ("gpu remapped rows", {"remapped": Unread("not supported")}),
        ("gpu ecc", {"is_ecc_on": Unread("not supported")}),
        ("gpu ecc", {"is_ecc_on": False}),
        ("gpu ecc", {"uncorrected": Unread("no permission")}),
        ("gpu sram", {"is_sram_worn": Unread("not supported")}),
        ("gpu nvlink", {"links": Unread("no NVLink")}),
        ("gpu fabric", {"fabric": Unread("not supported")}),
        ("gpu fabric", {"fabric": Fabric(FABRIC_IN_PROGRESS, 0)}),
        ("gpu fabric", {"fabric": Fabric(FABRIC_NOT_STARTED, 0)}),
    ],
)
def test_what_could_not_be_asked_is_unknown_and_never_healthy(check: str, changes: dict[str, Any]):
    found = judged(gpus(2, **changes))
    assert of(check, found).verdict is Verdict.UNKNOWN
    assert {f.check for f in found if f.verdict is not Verdict.HEALTHY} == {check}


def test_what_is_wrong_with_one_is_not_hidden_by_what_is_unknown_of_another():
    both = gpus(3, recovery=2)
    both[0] = msgspec.structs.replace(both[0], recovery=Unread("too old"))
    finding = of("gpu recovery action", judged(both))
    assert finding.verdict is Verdict.UNHEALTHY and "node reboot" in finding.evidence


def test_links_are_held_against_those_of_the_other_gpus():
    def verdict(*active: int, total: int = 18) -> Verdict:
        made = [
            msgspec.structs.replace(WELL, index=n, links=Links(up, total))
            for n, up in enumerate(active)
        ]
        return of("gpu nvlink", judged(made)).verdict

    assert verdict(18, 18) is Verdict.HEALTHY
    assert verdict(12, 12) is Verdict.HEALTHY, "a machine that has no more"
    assert verdict(12, 18) is Verdict.UNHEALTHY
    assert verdict(0, 0) is Verdict.UNKNOWN, "without bridges, or without all of them"
    assert verdict(12) is Verdict.UNKNOWN, "nothing to hold it against"
    assert verdict(18) is Verdict.HEALTHY


def test_a_machine_without_switches_has_no_fabric_to_register_with():
    found = judged(gpus(1, fabric=Fabric(FABRIC_ABSENT, 0)))
    assert of("gpu fabric", found).verdict is Verdict.HEALTHY


def test_what_is_true_of_all_gpus_is_said_once():
    made = [msgspec.structs.replace(g, recovery=Unread("too old")) for g in gpus(8)]
    assert of("gpu recovery action", judged(made)).evidence == "all GPUs: too old"


def test_gpus_are_counted_against_what_is_expected():
    assert gpu_count(8, 8, 0).verdict is Verdict.HEALTHY
    assert gpu_count(8, 8, 8).verdict is Verdict.HEALTHY
    assert gpu_count(7, 7, 8).verdict is Verdict.UNHEALTHY
    assert gpu_count(4, 8, 4).verdict is Verdict.HEALTHY, "a container with half of a machine"
    assert gpu_count(7, 8, 0).verdict is Verdict.UNKNOWN, "lost, or not for this container"


# --- the stand-in --------------------------------------------------------------------------------


def stand_in() -> Any:
    spec = importlib.util.spec_from_file_location("stand_in_for_pynvml", STAND_IN)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stand_in_keeps_to_the_names_and_numbers_of_the_real_module():
    real, fake = importlib.import_module("pynvml"), stand_in()
    assert real.__file__ != fake.__file__
    used = set(re.findall(r"nvml\.((?:nvml|NVML|c_nvml)\w+)", Path(nvml.__file__).read_text()))
    assert len(used) > 15
    for name in sorted(used):
        theirs, ours = getattr(real, name), getattr(fake, name)
        if inspect.isclass(theirs):
            fields = dict(getattr(theirs, "_fields_", ()))
            assert dict(getattr(ours, "_fields_", ())).keys() <= fields.keys(), name
        elif callable(theirs):
            given = list(inspect.signature(ours).parameters)
            wrapped = inspect.unwrap(theirs)
            assert given == list(inspect.signature(wrapped).parameters), name
        else:
            assert theirs == ours, name
    for name in nvml._IN_TROUBLE + nvml._NO_MORE_LINKS:
        assert getattr(real, name) == getattr(fake, name), name
    assert real.NVMLError(real.NVML_ERROR_GPU_IS_LOST).value == fake.NVML_ERROR_GPU_IS_LOST
