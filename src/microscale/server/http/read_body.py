"""Reads a request's body: JSON, plain or gzipped, within limits of size and time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from microscale.server import error_texts
from microscale.server.options import RequestLimits

DISCARD_FACTOR = 64
"""How many times the maximum body size is read and discarded before the connection is closed."""


async def read_body(request: Request, limits: RequestLimits) -> bytes:
    """The body, decompressed.

    Only JSON is accepted: any web page can make a browser send other types to a local server without a preflight.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise error_texts.not_json()
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip"):
        raise error_texts.unknown_encoding(encoding)
    stream = request.stream()
    try:
        async with asyncio.timeout(limits.read_timeout_s):
            packed = await _read(request, stream, limits)
    except TimeoutError:
        raise error_texts.body_timeout(limits.read_timeout_s) from None
    return packed if encoding == "identity" else unzip(packed, limits.max_body_bytes)


async def _read(request: Request, stream: AsyncIterator[bytes], limits: RequestLimits) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdecimal() and len(length) < 20 and int(length) > limits.max_body_bytes:
        # A client that waits for "100 Continue" sends no body after this reply.
        if request.headers.get("expect", "").lower() != "100-continue":
            await _discard(stream, limits)
        raise error_texts.body_too_large(limits.max_body_bytes)
    pieces: list[bytes] = []
    size = 0
    async for piece in stream:
        size += len(piece)
        if size > limits.max_body_bytes:
            await _discard(stream, limits)
            raise error_texts.body_too_large(limits.max_body_bytes)
        pieces.append(piece)
    return b"".join(pieces)


async def _discard(stream: AsyncIterator[bytes], limits: RequestLimits) -> None:
    """Read on without keeping anything. Most clients read the reply only after sending their whole body; if the
    connection were closed earlier, they would see a reset and never the 413."""
    left = DISCARD_FACTOR * limits.max_body_bytes
    async for piece in stream:
        left -= len(piece)
        if left < 0:
            return


def unzip(packed: bytes, most: int) -> bytes:
    """Decompress gzip, and stop at ``most`` bytes."""
    unpacker = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        data = unpacker.decompress(packed, most + 1)
    except zlib.error as error:
        raise error_texts.bad_gzip(str(error)) from None
    if len(data) > most:
        raise error_texts.body_too_large(most)
    if not unpacker.eof or unpacker.unused_data:
        raise error_texts.bad_gzip("it is cut off, or other data follows it")
    return data
