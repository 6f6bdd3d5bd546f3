"""Messages on the wire: MessagePack by msgspec, versioned, bounded. Never a pickle.

Owns: encoding, size limits, the refusal of garbage. Does not own sockets.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

import msgspec

from stepfast.core.messages import (
    MESSAGE_BYTES_MAX,
    RANK_MESSAGE_BYTES_MAX,
    FromAgent,
    FromCoordinator,
    FromRank,
    ToRank,
)
from stepfast.errors import OperatingError

T = TypeVar("T")
_ENCODER = msgspec.msgpack.Encoder()


class Codec(Generic[T]):
    """Encodes one direction of a wire and decodes only that direction's messages."""

    def __init__(self, kind: type[T], bytes_max: int) -> None:
        """`kind` is the union of the direction's messages."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self.bytes_max = bytes_max

    def encode(self, message: T) -> bytes:
        """The bytes of a message; refuses what is over the limit."""
        data = _ENCODER.encode(message)
        if len(data) > self.bytes_max:
            raise OperatingError(
                f"{type(message).__name__} of {len(data)} bytes is over {self.bytes_max}"
            )
        return data

    def decode(self, data: bytes) -> T:
        """A message of this direction. Raises OperatingError for anything else."""
        if len(data) > self.bytes_max:
            raise OperatingError(f"a message of {len(data)} bytes is over {self.bytes_max}")
        try:
            message: T = self._decoder.decode(data)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            raise OperatingError(f"not a message of this protocol: {error}") from error
        return message


# The unions are types to msgspec, though not classes to a type checker.
AGENT_TO_COORDINATOR: Codec[FromAgent] = Codec(cast(Any, FromAgent), MESSAGE_BYTES_MAX)
COORDINATOR_TO_AGENT: Codec[FromCoordinator] = Codec(cast(Any, FromCoordinator), MESSAGE_BYTES_MAX)
RANK_TO_AGENT: Codec[FromRank] = Codec(cast(Any, FromRank), RANK_MESSAGE_BYTES_MAX)
AGENT_TO_RANK: Codec[ToRank] = Codec(cast(Any, ToRank), RANK_MESSAGE_BYTES_MAX)
