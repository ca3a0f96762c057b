"""Authentication: API keys and their owners; without keys, the host names that a local server answers to.

The application passes ``refuse``, which makes an error reply in the shape of the API that the request uses.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Collection, Sequence

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from microscale.errors import MicroscaleError
from microscale.server import error_texts

Refuse = Callable[[MicroscaleError, Scope], Response]
OWNER = "microscale.owner"
"""The key of the request's owner (by API key) in ``scope["state"]``."""


def owner_of(scope: Scope) -> str:
    return str(scope.get("state", {}).get(OWNER, ""))


class ApiKeys:
    """Lets requests with a valid key through. Every key is compared in full, so that timing reveals nothing."""

    def __init__(
        self, app: ASGIApp, keys: tuple[bytes, ...], refuse: Refuse, keyless: Collection[str] = frozenset()
    ) -> None:
        """``keyless``: paths that need no key."""
        self._app = app
        self._keys = keys
        self._refuse = refuse
        self._keyless = keyless
        self._owners = [(key, hashlib.sha256(b"owner:" + key).hexdigest()[:32]) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._keys and scope["type"] == "http" and scope["path"] not in self._keyless:
            owner = self.owner(scope)
            if owner is None:
                await self._refuse(error_texts.api_key_missing(), scope)(scope, receive, send)
                return
            scope.setdefault("state", {})[OWNER] = owner
        await self._app(scope, receive, send)

    def owner(self, scope: Scope) -> str | None:
        """The owner: a digest of the key. Owners do not see each other's responses."""
        headers = dict(scope["headers"])
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        # OpenAI's header and Anthropic's. Clients that know both may send a placeholder in one of them.
        given = (bearer.strip() if kind.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip())
        matched = None
        for known, owner in self._owners:
            for key in filter(None, given):
                if hmac.compare_digest(known, key):
                    matched = owner
        return matched


class AllowedHosts:
    """Refuses requests to the loopback address whose Host header is some other name.

    A web page can reach a local server by pointing its own name at this machine (DNS rebinding); the browser then
    treats both as one site. The page cannot choose the Host header. A server with keys needs no such check.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], refuse: Refuse) -> None:
        self._app = app
        self._refuse = refuse
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and is_loopback((scope.get("server") or ("",))[0]):
            name = _name(dict(scope["headers"]).get(b"host", b"").decode("latin-1"))
            if not self._allows(name):
                await self._refuse(error_texts.host_not_allowed(name), scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, name: str) -> bool:
        local = not name or name == "localhost" or name.endswith(".localhost") or _is_here(name)
        return local or name in self._allowed or "*" in self._allowed


def _name(host: str) -> str:
    """The part before the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_here(address: str) -> bool:
    """Whether no other site can claim this address: loopback, or 0.0.0.0 as `serve --host 0.0.0.0` prints it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    return parsed.is_loopback or parsed.is_unspecified


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
