"""The error tree. One word for each way in which stepfast refuses or stops.

    BaseException
    └── Interrupted            the generation ended under the user's code; never catch it
    Exception
    └── StepfastError          carries an exit code and one line that says what to change
        ├── UserError          78: the user's code or configuration; it will fail again
        │   ├── ConfigError    a setting, flag or file is wrong
        │   └── ScriptError    the script uses stepfast in a way that cannot work
        ├── UnfitError         85: this node does not pass its health checks; another may
        └── OperatingError     1: the world failed (port, disk, memory, peer); try again
            ├── NoRoomError    the node's memory is too small for the snapshots
            └── StateError     a slot or layout does not match what is asked of it

Operating *faults* of a running job are no exceptions: they are typed values (`core.faults.Fault`)
that flow to the machines. A broken invariant is an `AssertionError` and crashes, in production too.
"""

from __future__ import annotations

EXIT_FINISHED = 0
EXIT_TRY_AGAIN = 1
EXIT_USER_ERROR = 78
EXIT_NODE_UNFIT = 85


class Interrupted(BaseException):
    """The generation that this code runs in is over; the stack unwinds to the resilient function's
    wrapper.

    It derives from BaseException so that `except Exception` does not swallow it.
    """


class StepfastError(Exception):
    """Base of all errors that stepfast raises; `str()` is one line that says what to change."""

    exit_code = EXIT_TRY_AGAIN


class UserError(StepfastError):
    """The user's code or configuration is at fault and will fail again."""

    exit_code = EXIT_USER_ERROR


class ConfigError(UserError):
    """A setting, flag or file is wrong."""


class ScriptError(UserError):
    """The training script uses stepfast in a way that cannot work."""


class UnfitError(StepfastError):
    """This node does not pass its health checks. Trying again may help elsewhere, not here."""

    exit_code = EXIT_NODE_UNFIT


class OperatingError(StepfastError):
    """The world failed: a port, a disk, memory, a peer. Trying again may help."""


class NoRoomError(OperatingError):
    """The memory for snapshots is too small; on this node it will be the next time, too."""


class StateError(OperatingError):
    """A slot or a layout does not match what is asked of it."""
