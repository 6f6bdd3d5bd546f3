"""A stand-in for NVIDIA's `pynvml`: loaded in its place by a process whose path begins here.

What it answers is read from the JSON file that NVML_STAND_IN names: a list of GPUs, each with what
differs from one that is well; a value {"error": N} raises. "hang" and "crash" with the name of a
function do what they say. `tests/unit/test_health_gpus.py` holds its names and parameters to those
of the real module.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_CORRUPTED_INFOROM = 14
NVML_ERROR_GPU_IS_LOST = 15
NVML_ERROR_RESET_REQUIRED = 16
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NVML_NVLINK_MAX_LINKS = 36

WELL: dict[str, Any] = {
    "recovery": 0,
    "remapped": [0, 0, 0, 0],
    "ecc": 1,
    "uncorrected": 0,
    "sram": 0,
    "links": [1] * 18,
    "fabric": [3, 0],
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return f"error {self.value} of the stand-in"


class c_nvmlEccSramErrorStatus_v1_t(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("bThresholdExceeded", ctypes.c_uint))


class c_nvmlGpuFabricInfo_v2_t(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint), ("status", ctypes.c_uint), ("state", ctypes.c_ubyte))


class _Value:
    uiVal = 0


class _Field:
    def __init__(self, answer: Any) -> None:
        self.value = _Value()
        self.nvmlReturn = answer["error"] if isinstance(answer, dict) else 0
        self.value.uiVal = 0 if isinstance(answer, dict) else answer


_machine: dict[str, Any] = {}


def _reached(function: str) -> None:
    if _machine.get("hang") == function:
        time.sleep(600)
    if _machine.get("crash") == function:
        ctypes.string_at(0)
    if (error := _machine.get("errors", {}).get(function)) is not None:
        raise NVMLError(error)


def _answer(handle: int, name: str) -> Any:
    answer = {**WELL, **_machine["gpus"][handle]}[name]
    if isinstance(answer, dict):
        raise NVMLError(answer["error"])
    return answer


def nvmlInit() -> None:
    _machine.update(json.loads(Path(os.environ["NVML_STAND_IN"]).read_text()))
    print("a line that a driver's library prints")
    _reached("nvmlInit")


def nvmlShutdown() -> None:
    _reached("nvmlShutdown")


def nvmlSystemGetDriverVersion() -> str:
    return "580.65.06"


def nvmlDeviceGetCount() -> int:
    _reached("nvmlDeviceGetCount")
    return len(_machine["gpus"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    _reached("nvmlDeviceGetHandleByIndex")
    if (lost := _machine["gpus"][index].get("lost")) is not None:
        raise NVMLError(lost)
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle}"


def nvmlDeviceGetFieldValues(handle: int, fieldIds: list[int]) -> list[_Field]:
    assert fieldIds == [NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
    return [_Field({**WELL, **_machine["gpus"][handle]}["recovery"])]


def nvmlDeviceGetRemappedRows(device: int) -> tuple[int, ...]:
    _reached("nvmlDeviceGetRemappedRows")
    return tuple(_answer(device, "remapped"))


def nvmlDeviceGetEccMode(handle: int) -> list[int]:
    return [_answer(handle, "ecc")] * 2


def nvmlDeviceGetTotalEccErrors(handle: int, errorType: int, counterType: int) -> int:
    assert (errorType, counterType) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return int(_answer(handle, "uncorrected"))


def nvmlDeviceGetSramEccErrorStatus(device: int, status: Any) -> int:
    status._obj.bThresholdExceeded = _answer(device, "sram")
    return 0


def nvmlDeviceGetNvLinkState(device: int, link: int) -> int:
    links = _answer(device, "links")
    if link >= len(links):
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    return int(links[link])


def nvmlDeviceGetGpuFabricInfoV(device: int, gpuFabricInfo: Any) -> int:
    info = gpuFabricInfo._obj
    info.state, info.status = _answer(device, "fabric")
    return 0
