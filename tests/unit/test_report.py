"""Exceptions as text: whose they are, and that they let go of what they hold."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from stepfast.core.faults import ErrorClass
from stepfast.errors import ConfigError, OperatingError, StateError
from stepfast.train.device_errors import STICKY as STICKY_CODES
from stepfast.train.report import class_of, forget_frames, report_of

GLOO = "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def chained(inner: BaseException, outer: BaseException) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as first:
            raise outer from first
    except Exception as caught:  # noqa: BLE001 - the test's own
        return caught


# Messages as torch, its libraries and NCCL word them.
STICKY = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegal"
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:77, unhandled cuda error (run with NCCL_DEBUG=INFO), NCCL"
    " version 2.30.7\nLast error:\nCuda failure 700 'an illegal memory access was encountered'"
)
REMOTE = (
    "NCCL error: remote process exited or there was a network error\nLast error:\nsocketProgress"
)


def numbered(code: int, text: str) -> BaseException:
    error = torch.AcceleratorError(text)
    error.error_code = code  # as torch does where it makes one
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError(STICKY),
        RuntimeError(STICKY),  # of an extension built against another torch
        numbered(710, "CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        dist.DistBackendError(NCCL),
        chained(torch.AcceleratorError(STICKY), ValueError("mine")),
        chained(torch.AcceleratorError(STICKY), RuntimeError(GLOO)),
        chained(torch.OutOfMemoryError("CUDA out of memory"), torch.AcceleratorError(STICKY)),
    ],
)
def test_an_error_that_stays_is_the_devices_whatever_it_is_wrapped_in(error):
    assert class_of(error) is ErrorClass.DEVICE
    assert report_of(error, forming=True).error_class is ErrorClass.DEVICE


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        numbered(2, "CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_memory_that_ran_out_is_no_error_that_stays(error):
    assert class_of(error) is ErrorClass.MEMORY


@pytest.mark.parametrize("error", [dist.DistBackendError(REMOTE), dist.DistNetworkError("CUDA")])
def test_a_peers_error_is_not_the_devices(error):
    assert class_of(error) is ErrorClass.COLLECTIVE


def test_what_cuda_says_of_sticky_errors_is_recognised():
    for code, words in STICKY_CODES.items():
        assert class_of(numbered(code, f"CUDA error: {words}")) is ErrorClass.DEVICE
        assert class_of(dist.DistBackendError(f"Cuda failure '{words}'")) is ErrorClass.DEVICE


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), ErrorClass.USER),
        (ConfigError("x"), ErrorClass.USER),
        (RuntimeError(GLOO), ErrorClass.COLLECTIVE),
        (dist.DistBackendError("x"), ErrorClass.COLLECTIVE),
        (chained(RuntimeError(GLOO), ValueError("mine")), ErrorClass.COLLECTIVE),
        (MemoryError(), ErrorClass.MEMORY),
        (torch.OutOfMemoryError("x"), ErrorClass.MEMORY),
        (OSError(5, "EIO"), ErrorClass.IO),
        (OperatingError("x"), ErrorClass.IO),
        (StateError("does not fit"), ErrorClass.STATE),
        (chained(OSError(2, "no such file"), StateError("x")), ErrorClass.STATE),
        (chained(OSError(28, "full"), RuntimeError("save failed")), ErrorClass.IO),
    ],
)
def test_an_exception_is_somebodys(error, expected):
    assert class_of(error) is expected


def test_a_report_names_the_line_of_the_users_code():
    try:
        torch.zeros(2) @ torch.zeros(3)
    except RuntimeError as error:
        report = report_of(error)
    assert report.frame.startswith(f"{__file__}:")
    assert report.type == "RuntimeError"
    assert "Traceback" in report.traceback


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self):
        raise TypeError("cannot be pickled")


def test_an_exception_that_cannot_be_read_or_pickled_is_reported_all_the_same():
    try:
        raise Unreadable
    except Unreadable as error:
        report = report_of(error)
    assert "cannot be read" in report.message


def test_a_huge_traceback_is_cut_in_the_middle():
    try:
        raise ValueError("x" * 500_000)
    except ValueError as error:
        report = report_of(error)
    assert len(report.traceback) < 40_000
    assert "left out" in report.traceback


def fail_with_tensor(seen: list) -> None:
    tensor = torch.zeros(10)
    seen.append(weakref.ref(tensor))
    try:
        raise KeyError("inner")
    except KeyError as inner:
        raise ValueError("outer") from inner


def test_no_tensor_of_the_failed_step_lives_on_even_where_the_exception_is_kept():
    seen: list = []
    kept = None
    try:
        fail_with_tensor(seen)
    except ValueError as error:
        kept = error
        forget_frames(error)
    gc.collect()
    assert kept is not None
    assert seen[0]() is None
