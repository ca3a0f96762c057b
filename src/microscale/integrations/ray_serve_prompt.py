"""The part of a request that decides its prompt, as text: what ``prefix_routing`` makes a chain of."""

from __future__ import annotations

from typing import Any

import msgspec

FIRST = ("tools", "functions", "system", "instructions")
"""Fields of a request that models are told before the conversation, in all APIs that the server speaks."""
CONVERSATION = ("messages", "input", "prompt")


def prompt_text(body: bytes) -> bytes:
    """What of a request's JSON decides its prompt, in the order in which a model is told it. Empty for other bodies.

    A conversation that goes on gives a text that begins with the text of before. It is not the prompt itself: only
    the replica has the chat format.
    """
    try:
        request: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return b""
    if not isinstance(request, dict):
        return b""
    parts = [_json(request[name]) for name in FIRST if request.get(name)]
    for name in CONVERSATION:
        said = request.get(name)
        if isinstance(said, str):
            parts.append(said.encode("utf-8", "backslashreplace"))
        elif isinstance(said, list) and said and isinstance(said[0], int):
            parts.append(_json(said)[:-1])  # token ids, without the bracket that ends them
        elif isinstance(said, list):
            parts.extend(map(_json, said))
    return b"\n".join(parts)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
