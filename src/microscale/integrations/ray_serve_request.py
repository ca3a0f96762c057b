"""What the processes of a Ray Serve application send each other: requests with their bodies, answers in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from starlette.types import Scope

KEPT = ("type", "http_version", "method", "scheme", "query_string", "client", "server")
"""The parts of an ASGI scope that the application reads besides path and headers."""


@dataclass
class RoutedRequest:
    """One request on its way to a replica. Only scope and body leave the process that routes it."""

    scope: Scope
    body: bytes
    chain: Sequence[int] = ()
    """See ``prefix_routing``."""
    home: Any = None
    """The replica that stores the response which this request continues or fetches."""
    avoid: set[Any] = field(default_factory=set)
    """Replicas that could not answer it."""
    replica: Any = None
    """The last one that it was sent to. The router sets this."""

    def __reduce__(self) -> tuple[type[RoutedRequest], tuple[Scope, bytes]]:
        return RoutedRequest, (self.scope, self.body)


class ReplyHead(NamedTuple):
    """The first piece of an answer; the others are bytes of its body."""

    status: int
    headers: list[tuple[bytes, bytes]]


def plain_scope(scope: Scope, headers: list[tuple[bytes, bytes]]) -> Scope:
    """The scope as the application would get it from a server: plain data, without Ray's path prefix."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
    kept = {name: scope[name] for name in KEPT if name in scope}
    return {**kept, "path": path, "raw_path": path.encode(), "root_path": "", "headers": headers}


# ---- the text that decides a prompt ----------------------------------------------------------------------------------

FIRST = ("tools", "functions", "system", "instructions")
"""Fields that come before the conversation in a prompt, in all APIs."""
CONVERSATION = ("messages", "input", "prompt")


def prompt_text(body: bytes) -> bytes:
    """The parts of a request's JSON that decide its prompt, in the prompt's order; empty for other bodies.

    A conversation that goes on gives a text that begins with the earlier text. It is not the prompt itself: only the
    replica has the chat format.
    """
    try:
        request: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return b""
    if not isinstance(request, dict):
        return b""
    parts = [_json(request[name]) for name in FIRST if request.get(name)]
    for name in CONVERSATION:
        content = request.get(name)
        if isinstance(content, str):
            parts.append(content.encode("utf-8", "backslashreplace"))
        elif isinstance(content, list) and content and isinstance(content[0], int):
            parts.append(_json(content)[:-1])  # token ids, without the bracket that ends them
        elif isinstance(content, list):
            parts.extend(map(_json, content))
    return b"\n".join(parts)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
