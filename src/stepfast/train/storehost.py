"""The store process: hosts the TCPStore servers of the generations that meet at this node.

Owns: the servers. Does not own: which one a generation uses (the agent). A server lives in a
process of its own, so that no rank is special, and outside the zygote, where its thread would make
forks hang.

Invariants: a server listens on the asked host alone; only the newest `SERVERS_MAX` live.
"""

from __future__ import annotations

import datetime
import socket
from collections import deque
from typing import Final

from torch._C._distributed_c10d import TCPStore

from stepfast.runtime import spawning

SERVERS_MAX: Final = 2
BACKLOG: Final = 1024
STORE_TIMEOUT_S: Final = 60.0


def serve(sock: socket.socket) -> int:
    """Open a server per request until the agent's end of `sock` closes; the exit code."""
    servers: deque[TCPStore] = deque(maxlen=SERVERS_MAX)
    while (received := spawning.receive(sock)) is not None:
        request, _ = received
        assert isinstance(request, spawning.OpenStore), f"unexpected {request!r}"
        answer: spawning.Message
        try:
            server, port = open_server(request.host)
        except (OSError, RuntimeError) as error:
            reason = f"no store on {request.host}: {str(error).splitlines()[0]}"
            answer = spawning.Refused(request_id=request.request_id, reason=reason)
        else:
            servers.append(server)
            answer = spawning.StoreOpened(request_id=request.request_id, port=port)
        spawning.send(sock, answer)
    return 0


def open_server(host: str) -> tuple[TCPStore, int]:
    """A TCPStore server that listens on `host` alone, and its port.

    Left to itself TCPStore listens on every address; a socket that is bound already keeps it to
    one. The descriptor belongs to torch from then on.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
        port: int = listener.getsockname()[1]
    except OSError:
        listener.close()
        raise
    server = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=STORE_TIMEOUT_S),
        master_listen_fd=listener.detach(),
    )
    return server, port
