"""What passes between the processes of a Ray Serve application: requests with their bodies, answers in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.types import Scope

KEPT = ("type", "http_version", "method", "scheme", "query_string", "client", "server")
"""Of an ASGI scope, what the application reads besides path and headers."""


@dataclass
class RoutedRequest:
    """One request on its way to a replica. Where it may go stays in the process that routes it."""

    scope: Scope
    body: bytes
    chain: Sequence[int] = ()
    """Of its prompt; see ``prefix_routing``."""
    home: Any = None
    """The replica that keeps the response which this request continues or asks for."""
    avoid: set[Any] = field(default_factory=set)
    """Replicas that could not answer it."""
    replica: Any = None
    """Where it was sent last; the router says so."""

    def __reduce__(self) -> tuple[type[RoutedRequest], tuple[Scope, bytes]]:
        return RoutedRequest, (self.scope, self.body)


class ReplyHead(NamedTuple):
    """The first piece of an answer; the others are bytes of its body."""

    status: int
    headers: list[tuple[bytes, bytes]]


def plain_scope(scope: Scope, headers: list[tuple[bytes, bytes]]) -> Scope:
    """The scope as the application of a server of its own would see it: plain data, and no path before its own."""
    path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
    kept = {name: scope[name] for name in KEPT if name in scope}
    return {**kept, "path": path, "raw_path": path.encode(), "root_path": "", "headers": headers}
