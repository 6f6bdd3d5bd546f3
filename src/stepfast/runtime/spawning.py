"""What the agent, its zygote and its store say to each other, and the sockets that carry it.

Owns: the message types, the tag that marks a rank's processes, sending and receiving with
descriptors. Does not own: any process (`agent.processes`, `train.zygote`). Both sides import this
file, so it never imports torch.

Invariants: a message is one SEQPACKET datagram, so there is no framing and no partial read. A tag
is `TAG_BYTES` long, because a rank writes it over the placeholder in its own initial environment,
where /proc shows it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from typing import Final, TypeAlias

import msgspec

from stepfast.errors import OperatingError

MESSAGE_BYTES_MAX: Final = 1 << 20
SOCKET_BUFFER_BYTES: Final = 2 * MESSAGE_BYTES_MAX
TAG_VARIABLE: Final = "STEPFAST_RANK_TAG"
TAG_BYTES: Final = 48
DEFAULT_ENTRY: Final = "stepfast.train.entry:run_rank"

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36


class RankLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank's process is born with.

    `environment` goes on top of the agent's own environment; None takes a variable out. `label`
    names the process in `ps` (15 bytes are shown). `entry` is "module:function", called as
    `function(socket, script, script_args) -> int`.
    """

    script: str
    script_args: list[str]
    working_directory: str
    log_path: str
    label: str
    environment: dict[str, str | None] = {}
    entry: str = DEFAULT_ENTRY


class PreloadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a zygote preloads. It travels in a memfd, which the zygote rewrites before it executes
    itself again.

    `learned` is what a throw-away child loaded for a training step, None where that is still to be
    found out.
    """

    agent_pid: int
    script: str
    names: list[str] = []
    learned: list[str] | None = None
    excluded: list[str] = []
    executions: int = 0


class ForkRank(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agent to zygote, with the rank's socket end: make a rank."""

    request_id: int
    tag: str
    launch: RankLaunch


class ForkStore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agent to zygote, with the store's socket end: make the store process."""

    request_id: int
    tag: str
    log_path: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Zygote to agent: preloaded, serving. `learned` and `excluded` spare the next zygote the
    search."""

    seconds: float
    modules: int
    learned: list[str] | None
    excluded: list[str]


class PreloadNote(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Zygote to agent: `module` is not preloaded (or nothing was learned, with no module), and
    why."""

    module: str
    reason: str


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Zygote to agent: the process that was asked for is the agent's child by now."""

    request_id: int
    pid: int
    start_time_ticks: int


class OpenStore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agent to store: a fresh TCPStore that listens on `host`."""

    request_id: int
    host: str


class StoreOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Store to agent: the new server's port."""

    request_id: int
    port: int


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Zygote or store to agent: the request failed, and may be tried again."""

    request_id: int
    reason: str


ToZygote: TypeAlias = ForkRank | ForkStore
ToAgent: TypeAlias = Ready | PreloadNote | Forked | StoreOpened | Refused
Message: TypeAlias = ToZygote | ToAgent | OpenStore

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_plan_decoder = msgspec.msgpack.Decoder(PreloadPlan)
_libc = ctypes.CDLL(None, use_errno=True)


def socket_pair(
    kind: socket.SocketKind = socket.SOCK_SEQPACKET,
) -> tuple[socket.socket, socket.socket]:
    """Two connected Unix sockets that are closed on exec and take a message of `MESSAGE_BYTES_MAX`
    where allowed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    return ours, theirs


def send(sock: socket.socket, message: Message, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message; raises OperatingError where the peer is gone, full, or the message too
    long."""
    try:
        socket.send_fds(sock, [_encoder.encode(message)], descriptors, socket.MSG_NOSIGNAL)
    except OSError as error:
        raise OperatingError(f"{type(message).__name__} could not be sent: {error}") from error


def receive(sock: socket.socket) -> tuple[Message, list[int]] | None:
    """One message with its descriptors (closed on exec), or None at the end; BlockingIOError where
    nothing waits."""
    try:
        content, descriptors, flags, _ = socket.recv_fds(
            sock, MESSAGE_BYTES_MAX, 4, socket.MSG_CMSG_CLOEXEC
        )
    except ConnectionError:
        return None
    assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), (
        "a message was cut: its sender broke MESSAGE_BYTES_MAX"
    )
    if not content:
        return None
    return _decoder.decode(content), descriptors


def write_plan(descriptor: int, plan: PreloadPlan) -> None:
    """Replace the memfd's content."""
    content = _encoder.encode(plan)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)


def read_plan(descriptor: int) -> PreloadPlan:
    """The plan in a memfd that `write_plan` filled."""
    return _plan_decoder.decode(os.pread(descriptor, os.fstat(descriptor).st_size, 0))


def zygote_command(control_descriptor: int, plan_descriptor: int) -> list[str]:
    """The arguments that start a zygote. `-P`: the working directory must not hide an installed
    package."""
    descriptors = ["--control-fd", str(control_descriptor), "--plan-fd", str(plan_descriptor)]
    return [sys.executable, "-P", "-m", "stepfast.train.zygote", *descriptors]


def make_tag(node_tag: str, name: str) -> str:
    """The tag of one process: the node's part ends with a colon, the padding makes every tag
    equally long."""
    tag = f"{node_tag}{name}".ljust(TAG_BYTES, "_")
    assert len(tag) == TAG_BYTES, f"tag {tag!r} is longer than {TAG_BYTES} bytes"
    return tag


def write_tag_in_place(tag: str) -> None:
    """Make /proc/self/environ show `tag`, for this process and all that it forks.

    A fork shows the environment of the last exec, so `os.environ` alone would mark only what the
    rank executes, not what it merely forks. The placeholder on the initial stack has the same
    length.
    """
    with open("/proc/self/environ", "rb") as file:
        environment = file.read()
    marker = f"{TAG_VARIABLE}=".encode()
    offset = environment.find(marker)
    if offset < 0:
        return
    with open("/proc/self/stat", "rb") as file:
        environment_start = int(file.read().rpartition(b")")[2].split()[47])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(environment_start + offset + len(marker))
        memory.write(tag.encode())


def become_subreaper(enabled: bool = True) -> None:
    """Orphans below this process become its children; raises OperatingError where the kernel
    refuses."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(enabled))


def die_with_parent(signal_number: int) -> None:
    """The kernel sends this process the signal when its present parent ends, stopped or not."""
    _prctl(_PR_SET_PDEATHSIG, signal_number)


def name_process(label: str) -> None:
    """Show `label` (its first 15 bytes) as this process's name in `ps` and `top`."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(label.encode()[:15]))


def _prctl(option: int, value: int | ctypes.c_char_p) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OperatingError(f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}")
