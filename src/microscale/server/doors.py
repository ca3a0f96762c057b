"""Who is let in: by key, and without keys by the name under which this machine is called."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from microscale.errors import MicroscaleError
from microscale.server.anthropic.errors import error_reply, speaks_anthropic
from microscale.server.faults import ForeignName, Unauthorized, error_headers, error_json, fault_of
from microscale.server.http.connection import OWNER
from microscale.server.http.manners import request_id_of
from microscale.server.pages import PAGES

OPEN = ("/health", "/ping")
"""Need no key: a load balancer has none."""
KEYLESS = frozenset({*OPEN, *PAGES})
"""The web page has nothing to hide either, and asks for the key itself: a browser sends none for a page."""


def error_response(error: MicroscaleError, scope: Scope) -> Response:
    """In the shape of the API that the request speaks."""
    if speaks_anthropic(scope):
        body, status, headers = error_reply(error, request_id_of(scope))
        return Response(body, status, headers, "application/json")
    return Response(error_json(error), fault_of(error).status, error_headers(error), "application/json")


class Keys:
    """Lets through who has a key. Every key is compared in full, so that time tells nothing about any."""

    def __init__(self, app: ASGIApp, keys: tuple[bytes, ...]) -> None:
        self._app = app
        self._keys = keys
        self._owners = [(key, hashlib.sha256(b"owner:" + key).hexdigest()[:32]) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and scope["path"] not in KEYLESS:
            owner = self._owner(scope)
            if owner is None:
                error = Unauthorized(
                    "The API key is missing or wrong: send the header Authorization: Bearer KEY, or x-api-key: KEY."
                )
                await error_response(error, scope)(scope, receive, send)
                return
            scope.setdefault("state", {})[OWNER] = owner
        await self._app(scope, receive, send)

    def _owner(self, scope: Scope) -> str | None:
        """Whose key it is, by a digest of it: what is kept for one is nothing to another."""
        headers = dict(scope["headers"])
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        # OpenAI's way, and Anthropic's. Clients that know both may send a placeholder in one of them.
        given = (bearer.strip() if kind.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip())
        found = None
        for known, owner in self._owners:
            for key in filter(None, given):
                if hmac.compare_digest(known, key):
                    found = owner
        return found


class Names:
    """Refuses what comes to the loopback address under a foreign name.

    A page from elsewhere reaches a local server by giving its own name this machine's address (DNS rebinding); the
    browser then takes both for one site. It cannot choose the header Host. Who has keys needs no such rule.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _is_loopback((scope.get("server") or ("",))[0]):
            name = _name(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
            if not self._knows(name):
                told = f"Without API keys this server answers on this machine as localhost, not as {name[:64]!r}"
                error = ForeignName(f"{told}; allow that name with --allowed-host.")
                await error_response(error, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _knows(self, name: str) -> bool:
        local = not name or name == "localhost" or name.endswith(".localhost") or _is_here(name)
        return local or name in self._allowed or "*" in self._allowed


def _name(host: str) -> str:
    """What stands before the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_here(address: str) -> bool:
    """A number and no name, so no other site's: that of loopback, or 0.0.0.0 as `serve --host 0.0.0.0` prints it."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_loopback or found.is_unspecified


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
