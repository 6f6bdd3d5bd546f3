"""What is no message of a direction is refused, whatever it is."""

from __future__ import annotations

import pickle  # noqa: TID251 - it is what has to be refused
import random

import pytest

from stepfast.core.messages import Hello
from stepfast.core.terms import NodeId
from stepfast.errors import OperatingError
from stepfast.runtime import wire


class Payload:
    """Unpickling it would call something."""

    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("raise SystemExit('unpickled')",)


HELLO = wire.AGENT_TO_COORDINATOR.encode(Hello(protocol=1, node=NodeId(0), host="here", pid=7))
CODECS = {
    name: getattr(wire, name)
    for name in ("AGENT_TO_COORDINATOR", "COORDINATOR_TO_AGENT", "RANK_TO_AGENT", "AGENT_TO_RANK")
}


@pytest.mark.parametrize("name", CODECS)
def test_pickles_cuts_and_noise_are_refused(name: str) -> None:
    codec, chance = CODECS[name], random.Random(name)
    garbage = [pickle.dumps(Payload(), protocol) for protocol in range(6)]
    garbage += [HELLO[:length] for length in range(len(HELLO))]
    garbage += [chance.randbytes(chance.randrange(200)) for _ in range(300)]
    garbage += [bytes(codec.bytes_max + 1), b"\x91" * 5000, HELLO + b"\0"]
    for data in garbage:
        with pytest.raises(OperatingError):
            codec.decode(data)


def test_a_message_of_another_direction_is_refused() -> None:
    assert isinstance(wire.AGENT_TO_COORDINATOR.decode(HELLO), Hello)
    for name, codec in CODECS.items():
        if name != "AGENT_TO_COORDINATOR":
            with pytest.raises(OperatingError):
                codec.decode(HELLO)
