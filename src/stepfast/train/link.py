"""The rank's end of the socket to its agent: whole messages, never a block of the training loop.

Owns: the socket, the outbox. Does not own: what is said (`core.rank`, `train.session`) or the
thread that reads. Invariant: messages leave in the order in which they were given; what does not
fit the socket's buffer waits, bounded.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import deque

from stepfast.core.messages import FromRank, RankLogged, ToRank
from stepfast.runtime.wire import AGENT_TO_RANK, RANK_TO_AGENT

_OUTBOX_MESSAGES_MAX = 10_000  # an agent that reads nothing for so long is as good as dead


class AgentLink:
    """One connected SEQPACKET socket. `send` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over the socket."""
        sock.setblocking(False)
        self._socket = sock
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.dropped = 0

    @property
    def socket_fd(self) -> int:
        """To be watched for reading, and for writing while `has_backlog`."""
        return self._socket.fileno()

    @property
    def wake_fd(self) -> int:
        """Readable when a backlog arose or `wake` was called."""
        return self._wake

    @property
    def has_backlog(self) -> bool:
        """Whether messages wait for room."""
        return bool(self._outbox)

    def send(self, message: FromRank) -> None:
        """Send now if there is room, else when there is. Logged values are the first to go when
        nobody reads.
        """
        data = RANK_TO_AGENT.encode(message)
        with self._lock:
            if not self._outbox and self._try_send(data):
                return
            if len(self._outbox) >= _OUTBOX_MESSAGES_MAX or isinstance(message, RankLogged):
                self.dropped += 1
                return
            self._outbox.append(data)
        self.wake()

    def flush(self) -> None:
        """Send what waits, as far as there is room."""
        with self._lock:
            while self._outbox and self._try_send(self._outbox[0]):
                self._outbox.popleft()

    def wake(self) -> None:
        """Make the reading thread look up."""
        os.eventfd_write(self._wake, 1)

    def clear_wake(self) -> None:
        """Take the wake-up in."""
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return

    def receive(self) -> ToRank | None:
        """The next message; None where there is none yet. Raises EOFError when the agent is
        gone.
        """
        try:
            data = self._socket.recv(AGENT_TO_RANK.bytes_max + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the agent closed the socket")
        return AGENT_TO_RANK.decode(data)

    def _try_send(self, data: bytes) -> bool:
        try:
            self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True  # the agent is gone; the reader sees the end of file and acts on it
        return True
