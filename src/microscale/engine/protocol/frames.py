"""Messages on a stream of bytes: four bytes of length, big-endian, then that many bytes.

A length is checked as soon as it is known, before anything is kept of what follows, so a peer that sends garbage cannot
make this side hold more than ``MAX_FRAME``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from microscale.errors import BadMessage

MAX_FRAME = 16 * 2**20
"""Bytes of one message. The largest honest one, a prompt of ``MAX_PROMPT`` tokens, has 5 MiB."""
HEADER = 4


def frame(payload: bytes) -> bytes:
    """A message as it goes onto the stream."""
    _check(len(payload))
    return len(payload).to_bytes(HEADER, "big") + payload


class FrameReader:
    """Puts messages together again, however the stream cuts them."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.keeps_up = True
        """Whether the last ``feed`` was one whole message: what came is read as it came."""

    def feed(self, data: bytes) -> Iterable[bytes]:
        """The messages that ``data`` completes. Read all of them before the next ``feed``."""
        # What comes is one whole message as a rule: then nothing is put together.
        if not self._buffer and len(data) > HEADER and int.from_bytes(data[:HEADER], "big") == len(data) - HEADER:
            _check(len(data) - HEADER)
            self.keeps_up = True
            return (data[HEADER:],)
        self.keeps_up = False
        return self._cut(data)

    def _cut(self, data: bytes) -> Iterator[bytes]:
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEADER:
                size = int.from_bytes(buffer[start : start + HEADER], "big")
                _check(size)
                end = start + HEADER + size
                if len(buffer) < end:
                    break
                payload = bytes(buffer[start + HEADER : end])
                start = end
                yield payload
        finally:
            # Once for all messages: a prefix of a bytearray goes in constant time, and not once a message.
            del buffer[:start]


def _check(size: int) -> None:
    if not 0 < size <= MAX_FRAME:
        raise BadMessage(f"A message has {size} bytes; it must have 1 to {MAX_FRAME}.")
