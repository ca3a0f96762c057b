"""Messages on a stream of bytes: four bytes of length, big-endian, then that many bytes.

A length is checked as soon as it is known, before anything is kept of what follows, so a peer that sends garbage cannot
make this side hold more than ``MAX_FRAME``.
"""

from __future__ import annotations

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

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that ``data`` completes."""
        buffer = self._buffer
        # What comes is one whole message as a rule: then nothing is put together.
        if not buffer and len(data) > HEADER and int.from_bytes(data[:HEADER], "big") == len(data) - HEADER:
            _check(len(data) - HEADER)
            return [data[HEADER:]]
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= HEADER:
            size = int.from_bytes(buffer[start : start + HEADER], "big")
            _check(size)
            end = start + HEADER + size
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + HEADER : end]))
            start = end
        # Once for all messages, not once per message; deleting a prefix takes constant time.
        del buffer[:start]
        return payloads


def _check(size: int) -> None:
    if not 0 < size <= MAX_FRAME:
        raise BadMessage(f"A message has {size} bytes; it must have 1 to {MAX_FRAME}.")
