"""Which web pages may call this server from a browser (CORS).

A page of another origin gets no reply unless ``--allowed-origin`` names that origin: the browser sends a preflight
first, and without our consent it neither sends the request nor shows the reply to the page.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
EXPOSED = "x-request-id, x-microscale-ignored, retry-after"
MAX_AGE_S = 600
"""How long a browser may cache our consent."""
ANY = "*"


class Cors:
    """Runs before the API-key check: a browser sends no key with a preflight."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._app = app
        self._any = ANY in origins
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        origin = headers.get("origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        allowed = self._any or origin.lower() in self._origins
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await self._preflight(headers, origin, allowed)(scope, receive, send)
            return
        added = self._consent(origin) if allowed else {"Vary": "Origin"}
        extra = [(name.lower().encode(), value.encode("latin-1")) for name, value in added.items()]

        async def send_consent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        await self._app(scope, receive, send_consent)

    def _consent(self, origin: str) -> dict[str, str]:
        return {
            "Access-Control-Allow-Origin": ANY if self._any else origin,
            "Access-Control-Expose-Headers": EXPOSED,
            "Vary": "Origin",
        }

    def _preflight(self, headers: Headers, origin: str, allowed: bool) -> Response:
        if not allowed:
            return Response(status_code=403, headers={"Vary": "Origin"})
        consent = self._consent(origin) | {
            "Access-Control-Allow-Methods": METHODS,
            # Any header: SDKs add a dozen of their own.
            "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "")[:2048],
            "Access-Control-Max-Age": str(MAX_AGE_S),
        }
        if headers.get("access-control-request-private-network") == "true":
            consent["Access-Control-Allow-Private-Network"] = "true"
        return Response(status_code=204, headers=consent)
