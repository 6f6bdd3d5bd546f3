"""Exceptions as text: whose they are, and that they let go of what they hold."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

from stepfast.core.faults import ErrorClass
from stepfast.errors import ConfigError, OperatingError, StateError
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
