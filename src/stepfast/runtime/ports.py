"""Every seam with the world, as a small protocol. The simulated twins implement the same names."""

from __future__ import annotations

from typing import Protocol

Buffer = bytes | bytearray | memoryview  # what `write` takes; collections.abc.Buffer is 3.12's


class Clock(Protocol):
    """Where time comes from."""

    def monotonic(self) -> float:
        """Seconds on a clock that only grows and that all processes of one machine share."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, for records only; never for a decision."""
        ...


class FaultPoints(Protocol):
    """Named places inside a rank where chaos may strike. The default does nothing."""

    @property
    def is_armed(self) -> bool:
        """Whether anything is still to come."""
        ...

    def reach(self, point: str, step: int) -> None:
        """Called at `forward`, `backward`, `optimizer`, `boundary` and `recovery` of `step`; may
        not return.
        """
        ...


class Mark(Protocol):
    """A place in what was queued on a device."""

    def query(self) -> bool:
        """Whether the device has come by; never waits. Raises RuntimeError for a broken device."""
        ...


class Accelerator(Protocol):
    """The device of a rank, behind which the host runs ahead. No call of it waits but `settle`.

    Any call may raise RuntimeError: an error that the device met earlier shows at whatever is
    called next.
    """

    @property
    def runs_behind(self) -> bool:
        """Whether what the host has begun may be undone yet; False: there is nothing to ask."""
        ...

    def enter(self) -> None:
        """Make it the calling thread's device. Each thread that touches the device calls it first,
        any number of times.
        """
        ...

    def mark(self) -> Mark:
        """A mark behind all that the calling thread has queued so far."""
        ...

    def is_busy(self) -> bool:
        """Whether anything is left of what was queued before; from any thread."""
        ...

    def settle(self, limit_s: float) -> str | None:
        """Wait until nothing is left; why not, in words, where it takes longer or the device is
        broken.
        """
        ...

    def obstacle(self) -> str | None:
        """What this process holds of the device that another generation cannot go on with."""
        ...

    def free_unused(self) -> None:
        """Give the memory back that no tensor uses."""
        ...


class Disk(Protocol):
    """The calls on files that durable state is made of. Each raises OSError, as the kernel says.

    Nothing that was written is durable before `sync`, and no name before `sync_directory`.
    """

    def create(self, path: str) -> int:
        """A descriptor for writing a new file; FileExistsError where there is one."""
        ...

    def open(self, path: str) -> int:
        """A descriptor for reading a regular file."""
        ...

    def reserve(self, descriptor: int, size_bytes: int) -> None:
        """Claim the space of a file that will be written; does nothing where that is not known."""
        ...

    def write(self, descriptor: int, data: Buffer) -> int:
        """Append; returns how many bytes were taken, which may be fewer than given."""
        ...

    def bypass_cache(self, descriptor: int, wanted: bool) -> bool:
        """From now on write to and read from the device itself, or no more; False: that cannot be
        had here.

        Then what is written or read is whole pages of memory, at a place in the file that is as
        well.
        """
        ...

    def start_writeback(self, descriptor: int, start: int, size_bytes: int) -> None:
        """Have these bytes on their way to the device; waits for nothing and promises nothing."""
        ...

    def sync(self, descriptor: int) -> None:
        """Make the file's bytes durable. After an error they are lost: write them again."""
        ...

    def read_into(self, descriptor: int, start: int, buffer: memoryview) -> int:
        """Fill the buffer from `start`; returns how many bytes there were, 0 at the end."""
        ...

    def is_cached(self, descriptor: int, start: int, size_bytes: int) -> bool:
        """Whether all these bytes lie in the page cache, or nobody can say."""
        ...

    def size_bytes(self, descriptor: int) -> int:
        """The file's size."""
        ...

    def close(self, descriptor: int) -> None:
        """Give the descriptor back."""
        ...

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in the place of what had it."""
        ...

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; FileExistsError where the name is taken."""
        ...

    def rename_new(self, source: str, target: str) -> None:
        """As `rename`, but FileExistsError where the name is taken. For what has no links."""
        ...

    def is_same_file(self, one: str, other: str) -> bool:
        """Whether two names are of one file."""
        ...

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        ...

    def make_directory(self, path: str) -> None:
        """A new directory; FileExistsError where there is anything of that name."""
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def entries(self, path: str) -> list[tuple[str, bool]]:
        """The names in a directory, sorted, each with whether it is a directory (links are not)."""
        ...
