"""Whether names resolve, quickly: TCPStore looks up its clients, Gloo the host's own name.

Owns: asking with a time limit. Does not own: the resolver.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stepfast.health.verdicts import Finding, healthy, unhealthy, unknown

LOOKUP_LIMIT_S = 3.0
_SLOW_S = 0.5
_HOSTS = "name it in /etc/hosts, or repair the name server in /etc/resolv.conf"


def loopback_name(look_up: Callable[[], str], limit_s: float = LOOKUP_LIMIT_S) -> Finding:
    """The reverse lookup of 127.0.0.1: that there is no name is fine, that it takes long is not."""
    check = "loopback's name"
    name, failure, seconds = _asked(look_up, limit_s)
    if seconds >= min(_SLOW_S, limit_s):
        evidence = f"looking up 127.0.0.1 took {_took(seconds, limit_s)}; each group waits for it"
        return unhealthy(check, evidence, f"127.0.0.1 localhost: {_HOSTS}")
    return healthy(check, name or f"none, said at once ({failure})")


def own_name(host: str, look_up: Callable[[], str], limit_s: float = LOOKUP_LIMIT_S) -> Finding:
    """The address of the host's own name, which Gloo binds to unless an interface is named."""
    check = "host's own name"
    address, failure, seconds = _asked(look_up, limit_s)
    if seconds >= min(_SLOW_S, limit_s):
        evidence = f"looking up {host} took {_took(seconds, limit_s)}"
        return unhealthy(check, evidence, f"{host}: {_HOSTS}")
    if failure is not None:
        change = f"{host}: {_HOSTS}; or name the interface in GLOO_SOCKET_IFNAME"
        return unknown(check, f"{host} has no address ({failure})", change)
    return healthy(check, f"{host} is {address}")


def _took(seconds: float, limit_s: float) -> str:
    return f"more than {limit_s:g} s" if seconds >= limit_s else f"{seconds:.1f} s"


def _asked(look_up: Callable[[], str], limit_s: float) -> tuple[str, str | None, float]:
    """The answer, or the failure, and how long it took. A resolver that hangs is left to itself."""
    answers: list[tuple[str, str | None]] = []
    arrived = threading.Event()

    def ask() -> None:
        try:
            answers.append((look_up(), None))
        except OSError as error:
            answers.append(("", str(error)))
        finally:
            arrived.set()

    began = time.monotonic()
    threading.Thread(target=ask, name="stepfast-lookup", daemon=True).start()
    if not arrived.wait(limit_s) or not answers:
        return "", "no answer", limit_s
    return (*answers[0], time.monotonic() - began)
