"""An exception as text, and whose it is. The traceback becomes words before anything is rebuilt.

Owns: the classification of exceptions. Does not own: what follows from it (`core.policy`).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator

import torch
import torch.distributed as dist

from stepfast.checkpoint.loading import CheckpointDamaged
from stepfast.core.faults import ErrorClass, ExceptionReport
from stepfast.errors import NoRoomError, OperatingError, StateError, UserError
from stepfast.train.device_errors import device_class_of

_TRACEBACK_BYTES_MAX = 32_000  # with everything else below the size limit of a rank's message
_MESSAGE_BYTES_MAX = 2_000
_CHAIN_MAX = 50
_OWN_DIRECTORY = os.path.dirname(os.path.dirname(__file__))
_TORCH_DIRECTORY = os.path.dirname(torch.__file__)
# What torch says where a script makes the default group itself.
_OWN_GROUP_WORDS = ("default process group twice", "environment variable MASTER_ADDR expected")
# What Gloo's errors look like: plain RuntimeErrors whose text names its sources or its socket.
_GLOO_WORDS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


def report_of(error: BaseException, *, forming: bool = False) -> ExceptionReport:
    """The exception as text. `forming`: it rose while groups were made, where peers explain
    most.
    """
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    text = _cut("".join(lines), _TRACEBACK_BYTES_MAX)
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    message = _cut(_message(error), _MESSAGE_BYTES_MAX)
    if any(words in message for words in _OWN_GROUP_WORDS):
        message += " (stepfast makes the process group: leave init_process_group out)"
    return ExceptionReport(
        type=f"{module}{kind.__qualname__}",
        message=message,
        traceback=text,
        frame=_user_frame(error),
        error_class=_class_while_forming(error) if forming else class_of(error),
    )


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:  # noqa: BLE001 - user code: its __str__ may raise anything
        return f"(its text cannot be read: {type(second).__name__})"


def _cut(text: str, bytes_max: int) -> str:
    """Text that any wire and console can take: no lone surrogates, and the middle left out."""
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) > bytes_max:
        half = bytes_max // 2
        middle = f"\n... {len(raw) - 2 * half} bytes left out ...\n".encode()
        raw = raw[:half] + middle + raw[-half:]
    return raw.decode("utf-8", "ignore")


def class_of(error: BaseException) -> ErrorClass:
    """Whose the exception is; one that was raised while handling another counts as that one."""
    of_device = [device_class_of(link, _message(link)) for link in _chain(error)]
    if ErrorClass.DEVICE in of_device:
        return ErrorClass.DEVICE
    for link in _chain(error):
        if isinstance(link, dist.DistError) or _is_gloo(link):
            return ErrorClass.COLLECTIVE
    for link, device_class in zip(_chain(error), of_device, strict=True):
        if isinstance(link, MemoryError) or device_class is ErrorClass.MEMORY:
            return ErrorClass.MEMORY
        if isinstance(link, CheckpointDamaged):
            return ErrorClass.CHECKPOINT
        if isinstance(link, StateError):
            return ErrorClass.STATE
        if isinstance(link, UserError):
            return ErrorClass.USER
        if isinstance(link, NoRoomError):
            return ErrorClass.ROOM
        if isinstance(link, OSError | OperatingError):
            return ErrorClass.IO
    return ErrorClass.USER


def _class_while_forming(error: BaseException) -> ErrorClass:
    """Peers explain most, but not a device that is lost."""
    found = class_of(error)
    return found if found is ErrorClass.DEVICE else ErrorClass.COLLECTIVE


def forget_frames(error: BaseException) -> None:
    """Let go of every frame that the exception holds, so that no tensor of the failed step lives
    on.
    """
    for link in _chain(error):
        if link.__traceback__ is not None:
            traceback.clear_frames(link.__traceback__)
            link.__traceback__ = None


def _is_gloo(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(word in _message(error) for word in _GLOO_WORDS)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen and len(seen) < _CHAIN_MAX:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _user_frame(error: BaseException) -> str:
    """File and line of the innermost frame outside stepfast and torch."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith((_OWN_DIRECTORY, _TORCH_DIRECTORY))]
    if not frames:
        return ""
    frame = (theirs or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"
