"""Where the main thread is, read from another thread: evidence for a suspected hang, never a
verdict.

Owns: the reading of frames. Does not own: limits and judgement (`core.faults`).
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from stepfast.core.faults import Whereabouts

STACK_CHARS_MAX = 8_000
_FRAMES_LOOKED_AT = 200  # a stack can be deep; beyond this nothing decides
_COLLECTIVE_FILES = ("/torch/distributed/", "/torch/_ops.py")
_COMPILE_FILES = ("/torch/_inductor/", "/torch/_dynamo/convert_frame.py", "/triton/")
_AUTOGRAD_FILE = "/torch/autograd/"


class Whereabout:
    """What the main thread says of itself (a plain attribute, so that saying it costs nothing), and
    its frames.
    """

    def __init__(self) -> None:
        """Nowhere in particular."""
        self._said: tuple[Whereabouts, float] | None = None
        self._main_ident = threading.main_thread().ident

    def clear(self) -> None:
        """Nowhere in particular, whatever an interrupt left behind."""
        self._said = None

    @contextmanager
    def said(self, where: Whereabouts) -> Iterator[None]:
        """The main thread waits for something that stepfast knows."""
        before, self._said = self._said, (where, time.monotonic())
        try:
            yield
        finally:
            self._said = before

    def look(self) -> tuple[Whereabouts, float, str]:
        """Where, for how many seconds as far as that is known, and the stack as text."""
        frame = sys._current_frames().get(self._main_ident or 0)
        stack = "".join(traceback.format_stack(frame))[-STACK_CHARS_MAX:] if frame else ""
        said = self._said
        if said is not None:
            return said[0], time.monotonic() - said[1], stack
        return (_read(frame) if frame else Whereabouts.USER), 0.0, stack


def _read(frame: FrameType) -> Whereabouts:
    files = list(_files(frame))
    if any(part in file for file in files for part in _COMPILE_FILES):
        return Whereabouts.COMPILE
    innermost = files[0]
    if any(part in innermost for part in _COLLECTIVE_FILES) or _AUTOGRAD_FILE in innermost:
        # Inside autograd's engine no frame tells a kernel from a wait in a reducer's hook; the one
        # behind is found by the number of collectives begun.
        return Whereabouts.COLLECTIVE
    return Whereabouts.USER


def _files(frame: FrameType | None) -> Iterator[str]:
    for _ in range(_FRAMES_LOOKED_AT):
        if frame is None:
            return
        yield frame.f_code.co_filename
        frame = frame.f_back
