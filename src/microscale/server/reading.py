"""Reads a request: its body parsed off the event loop, what was ignored of it logged and named in the reply."""

from __future__ import annotations

from typing import TypeVar

from microscale.server.host import Host
from microscale.server.http.exchange import Exchange
from microscale.server.requests.body import Body
from microscale.server.requests.ignored import IGNORED_HEADER, Ignored, ignored_header
from microscale.server.requests.parsing import parse

T = TypeVar("T", bound=Body)


async def read_request(host: Host, kind: type[T], body: bytes, exchange: Exchange) -> T:
    request, ignored = await host.off_loop(len(body), lambda: parse(kind, body, strict=host.strict_requests))
    tell_ignored(host, ignored, exchange)
    return request


def tell_ignored(host: Host, ignored: list[Ignored], exchange: Exchange) -> None:
    if ignored:
        host.ignored.tell(ignored)
        exchange.headers[IGNORED_HEADER] = ignored_header(ignored)
