"""Errors of the device, told from all others: by torch's types, else by the words of CUDA.

Owns: the words. Does not own: what follows (`core.policy`: memory that ran out may be tried again
in place, every other error of the device costs the process).

torch raises AcceleratorError for what its own calls of CUDA return, OutOfMemoryError for what its
allocator cannot get. cuBLAS, cuDNN, Triton and NCCL wrap the same errors into plain RuntimeErrors,
and a kernel's error shows at whatever call comes later. Never run on a GPU: the words are those of
CUDA 13's runtime (`cudaGetErrorString`), the types those of torch 2.8 to 2.14.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist

from stepfast.core.faults import ErrorClass

# What stays with the context until the process has ended ("sticky"), by the number of cudaError:
# all of which CUDA's driver_types.h says so, and uncorrectable errors of memory and NVLink.
STICKY: Final = {
    214: "uncorrectable ECC error encountered",
    220: "uncorrectable NVLink error detected during the execution",
    226: "Invalid access of peer GPU memory over nvlink or a hardware error",
    700: "an illegal memory access was encountered",
    702: "the launch timed out and was terminated",
    710: "device-side assert triggered",
    714: "hardware stack error",
    715: "an illegal instruction was encountered",
    716: "misaligned address",
    717: "operation not supported on global/shared address space",
    718: "invalid program counter",
    719: "unspecified launch failure",
    721: "tensor memory not completely freed",
    810: "the MPS client has been terminated by the server",
    911: "an async error has occured in external entity outside of CUDA",
}
_OUT_OF_MEMORY_CODE: Final = 2
_OUT_OF_MEMORY: Final = (
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
# How the message of a library begins its part about the device; the last is NCCL's.
_DEVICE_WORDS: Final = (
    "CUDA error",
    "CUDA driver error",
    "Triton Error [CUDA]",
    "cuDNN error",
    "CUBLAS_STATUS_",
    "CUSOLVER_STATUS_",
    "Cuda failure",
)


def device_class_of(error: BaseException, text: str) -> ErrorClass | None:
    """`MEMORY` or `DEVICE`, or None for what is no error of a device; `text` is its message."""
    if isinstance(error, torch.OutOfMemoryError):
        return ErrorClass.MEMORY
    is_of_device = any(words in text for words in _DEVICE_WORDS)
    if isinstance(error, dist.DistError):
        # NCCL tells its own device's error too: not a victim of others, and not to be kept.
        return ErrorClass.DEVICE if is_of_device and is_sticky_text(text) else None
    is_accelerators = isinstance(error, torch.AcceleratorError)
    if not is_accelerators and not (is_of_device and isinstance(error, RuntimeError)):
        return None
    code = getattr(error, "error_code", None)
    if code == _OUT_OF_MEMORY_CODE or any(words in text for words in _OUT_OF_MEMORY):
        return ErrorClass.MEMORY
    return ErrorClass.DEVICE


def is_sticky_text(text: str) -> bool:
    """Whether the message names an error that stays with the process."""
    return any(words in text for words in STICKY.values())
