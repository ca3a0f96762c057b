"""Encodes replies as JSON. They are msgspec structs and take about a microsecond each: every token sends a chunk.

``UNSET`` omits a field; ``None`` is sent as null, where OpenAI's clients expect one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from msgspec import Struct
from starlette.responses import Response

encode = msgspec.json.Encoder().encode


class TextSlot:
    """JSON that is encoded once, with a slot for one text."""

    def __init__(self, encoded: Callable[[str], bytes]) -> None:
        """``encoded`` makes the JSON for a text. It is called once, with a marker that occurs nowhere else."""
        mark = secrets.token_hex(16)
        self._around = encoded(mark).split(encode(mark))

    def filled(self, text: str) -> bytes:
        return encode(text).join(self._around)


def json_response(value: Struct, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
