"""A request's body: JSON, plain or gzipped, within bounds of size and time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from microscale.server.http.error_replies import BadField, BodyTooLarge, BodyTooSlow, NotJson, UnknownEncoding
from microscale.server.options import Limits

DISCARD_FACTOR = 64
"""How many times the largest body is read and dropped before a client that sends more is hung up on."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, unpacked.

    Only JSON is accepted: a browser sends other types to a local server from any page, without a preflight.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise NotJson("Send the body as JSON, with the header Content-Type: application/json.")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        raise UnknownEncoding(f"A body with Content-Encoding {encoding[:32]!r} is not taken; gzip and none are.")
    stream = request.stream()
    try:
        async with asyncio.timeout(limits.read_timeout_s):
            packed = await _read(request, stream, limits)
    except TimeoutError:
        raise BodyTooSlow(f"The body did not arrive within {limits.read_timeout_s:g} s.") from None
    return packed if encoding == "identity" else unzip(packed, limits.max_body_bytes)


async def _read(request: Request, stream: AsyncIterator[bytes], limits: Limits) -> bytes:
    said = request.headers.get("content-length", "")
    if said.isdecimal() and len(said) < 20 and int(said) > limits.max_body_bytes:
        # A client that waits for our consent to send sends nothing after this answer.
        if request.headers.get("expect", "").lower() != "100-continue":
            await _discard(stream, limits)
        raise BodyTooLarge(f"The body has {said} bytes; at most {limits.max_body_bytes} are taken.")
    pieces: list[bytes] = []
    size = 0
    async for piece in stream:
        size += len(piece)
        if size > limits.max_body_bytes:
            await _discard(stream, limits)
            raise BodyTooLarge(f"The body has more than {limits.max_body_bytes} bytes.")
        pieces.append(piece)
    return b"".join(pieces)


async def _discard(stream: AsyncIterator[bytes], limits: Limits) -> None:
    """Read on without keeping anything. Most clients read an answer only after they have sent all of their body; one
    that is hung up on while it sends sees a reset connection and never the 413."""
    left = DISCARD_FACTOR * limits.max_body_bytes
    async for piece in stream:
        left -= len(piece)
        if left < 0:
            return


def unzip(packed: bytes, most: int) -> bytes:
    """Unpacks gzip, and stops before it makes more than ``most`` bytes."""
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        data = unpacker.decompress(packed, most + 1)
    except zlib.error as error:
        raise BadField(f"The body is no gzip: {error}.", None) from None
    if len(data) > most:
        raise BodyTooLarge(f"The body unpacks to more than {most} bytes.")
    if not unpacker.eof or unpacker.unused_data:
        raise BadField("The body is no gzip: it is cut off, or something follows it.", None)
    return data
