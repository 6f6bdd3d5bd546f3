"""The driver's answers about GPUs, by NVML. For a throw-away process alone: it may hang or crash.

Owns: the calls. Does not own: what an answer means (`health.gpus`).

Never run on a GPU: tested with a stand-in in NVML's place, whose names and parameters are held to
those of NVIDIA's own `pynvml`.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from stepfast.health.gpus import Broken, Fabric, Gpu, Links, Remapped, Unread, gpu_count, judged
from stepfast.health.verdicts import Finding, healthy, unhealthy, unknown

T = TypeVar("T")
_IN_TROUBLE = (
    "NVML_ERROR_GPU_IS_LOST",
    "NVML_ERROR_RESET_REQUIRED",
    "NVML_ERROR_CORRUPTED_INFOROM",
)
_NO_MORE_LINKS = ("NVML_ERROR_INVALID_ARGUMENT", "NVML_ERROR_NOT_SUPPORTED")
_INSTALL = "pip install 'stepfast[gpu]'"
_UTILITY = "give the container the driver's libraries: NVIDIA_DRIVER_CAPABILITIES=compute,utility"
_DRIVER = "repair the driver until `nvidia-smi` answers, or replace the node"


def look(expected: int, device_files: int, say: Callable[[str], None]) -> Iterator[Finding]:
    """What the GPUs say. `say` is told what is asked next, in case it never answers."""
    say("NVML")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        yield unknown("gpu driver", "nvidia-ml-py is not installed", _INSTALL)
        return
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        yield _not_started(nvml, error)
        return
    driver = _asked(nvml, lambda: _text(nvml.nvmlSystemGetDriverVersion()))
    yield healthy("gpu driver", driver if isinstance(driver, str) else "answers")
    count = _asked(nvml, nvml.nvmlDeviceGetCount)
    if not isinstance(count, int):
        yield unhealthy("gpu count", count.reason, _DRIVER)
        return
    yield gpu_count(count, device_files, expected)
    gpus = []
    for index in range(count):
        say(f"GPU {index}")
        gpus.append(_gpu(nvml, index))
    yield from judged(gpus)
    say("the end of NVML")
    _asked(nvml, nvml.nvmlShutdown)


def _not_started(nvml: Any, error: Any) -> Finding:
    if error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND:
        return unknown("gpu driver", "libnvidia-ml.so.1 is not there", _UTILITY)
    return unhealthy("gpu driver", f"NVML does not start: {error}", _DRIVER)


def _asked(nvml: Any, ask: Callable[[], T]) -> T | Unread | Broken:
    """The answer, or why there is none."""
    try:
        return ask()
    except nvml.NVMLError as error:
        is_broken = error.value in {getattr(nvml, name, None) for name in _IN_TROUBLE}
        return (Broken if is_broken else Unread)(f"NVML says: {error}")
    except AttributeError as error:
        return Unread(f"this nvidia-ml-py is too old: {error}")


def _gpu(nvml: Any, index: int) -> Gpu:
    handle = _asked(nvml, lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if isinstance(handle, Unread | Broken):
        lost = Broken(handle.reason)  # a GPU that was counted and cannot be reached
        return Gpu(
            index=index,
            name="no answer",
            recovery=lost,
            remapped=lost,
            is_ecc_on=lost,
            uncorrected=lost,
            is_sram_worn=lost,
            links=lost,
            fabric=lost,
        )
    name = _asked(nvml, lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    return Gpu(
        index=index,
        name=name if isinstance(name, str) else "no name",
        recovery=_asked(nvml, lambda: _recovery(nvml, handle)),
        remapped=_asked(nvml, lambda: _remapped(nvml, handle)),
        is_ecc_on=_asked(nvml, lambda: nvml.nvmlDeviceGetEccMode(handle)[0] == 1),
        uncorrected=_asked(nvml, lambda: _uncorrected(nvml, handle)),
        is_sram_worn=_asked(nvml, lambda: _is_sram_worn(nvml, handle)),
        links=_asked(nvml, lambda: _links(nvml, handle)),
        fabric=_asked(nvml, lambda: _fabric(nvml, handle)),
    )


def _recovery(nvml: Any, handle: Any) -> int | Unread | Broken:
    (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if field.nvmlReturn != 0:
        return Unread(f"not known to this driver (NVML error {field.nvmlReturn}); 570 or newer is")
    return int(field.value.uiVal)


def _remapped(nvml: Any, handle: Any) -> Remapped:
    corrected, uncorrected, pending, failed = nvml.nvmlDeviceGetRemappedRows(handle)
    return Remapped(int(corrected), int(uncorrected), bool(pending), bool(failed))


def _uncorrected(nvml: Any, handle: Any) -> int:
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return int(nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds))


def _is_sram_worn(nvml: Any, handle: Any) -> bool:
    status = nvml.c_nvmlEccSramErrorStatus_v1_t()
    nvml.nvmlDeviceGetSramEccErrorStatus(handle, ctypes.byref(status))
    return bool(status.bThresholdExceeded)


def _links(nvml: Any, handle: Any) -> Links | Unread:
    """Links beyond those that a GPU has are answered with an error."""
    active = total = 0
    ends = {getattr(nvml, name) for name in _NO_MORE_LINKS}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active += nvml.nvmlDeviceGetNvLinkState(handle, link) == 1
            total += 1
        except nvml.NVMLError as error:
            if error.value not in ends:
                raise
    return Links(active, total) if total else Unread("no NVLink")


def _fabric(nvml: Any, handle: Any) -> Fabric:
    info = nvml.c_nvmlGpuFabricInfo_v2_t()
    nvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    return Fabric(int(info.state), int(info.status))


def _text(value: str | bytes) -> str:
    """Older versions of the binding give bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value
