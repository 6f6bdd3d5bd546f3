"""stepfast keeps PyTorch training running through faults.

`stepfast.resilient` and `stepfast.Run` load torch when they are first used; importing stepfast
loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepfast.errors import Interrupted

if TYPE_CHECKING:
    from stepfast.train.entry import resilient
    from stepfast.train.session import Run

__version__ = "0.1.0"
__all__ = ["Interrupted", "Run", "__version__", "resilient"]


def __dir__() -> list[str]:
    """The public names, those that are loaded on first use too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Load the user's side on first use."""
    if name == "resilient":
        from stepfast.train.entry import resilient

        return resilient
    if name == "Run":
        from stepfast.train.session import Run

        return Run
    raise AttributeError(f"module 'stepfast' has no attribute {name!r}")
