"""Messages on the wire: MessagePack by msgspec, versioned, bounded. Never a pickle.

Owns: encoding, size limits, the refusal of garbage. Does not own sockets.
"""

from __future__ import annotations

from typing import Generic, TypeVar

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


AGENT_TO_COORDINATOR: Codec[FromAgent] = Codec(FromAgent, MESSAGE_BYTES_MAX)  # type: ignore[arg-type]  # a union
COORDINATOR_TO_AGENT: Codec[FromCoordinator] = Codec(FromCoordinator, MESSAGE_BYTES_MAX)  # type: ignore[arg-type]  # a union
RANK_TO_AGENT: Codec[FromRank] = Codec(FromRank, RANK_MESSAGE_BYTES_MAX)  # type: ignore[arg-type]  # a union
AGENT_TO_RANK: Codec[ToRank] = Codec(ToRank, RANK_MESSAGE_BYTES_MAX)  # type: ignore[arg-type]  # a union
