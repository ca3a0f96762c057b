"""Replies as JSON. They are msgspec structs, encoded in about a microsecond: each token sends a chunk.

``UNSET`` leaves a field out; ``None`` is sent as null, where OpenAI's clients expect one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import msgspec
from msgspec import Struct
from starlette.responses import Response

encode = msgspec.json.Encoder().encode


class TextSlot:
    """JSON that was encoded but for one text, wherever it stands."""

    def __init__(self, encoded: Callable[[str], bytes]) -> None:
        """``encoded``: the JSON with a text, which is asked for once, with one that stands nowhere else."""
        mark = secrets.token_hex(16)
        self._around = encoded(mark).split(encode(mark))

    def filled(self, text: str) -> bytes:
        return encode(text).join(self._around)


def json_response(value: Struct, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")
