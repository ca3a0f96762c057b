"""What every request and reply needs: an id, the client's own or one that we make; HEAD as GET, without the body; and
nothing is sent to a client that has left."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from microscale.server.http.wire import WIRE, Wire

REQUEST_ID = "microscale.request_id"
"""The key of the request's id in ``scope["state"]``."""
_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def request_id_of(scope: Scope) -> str:
    return str(scope.get("state", {}).get(REQUEST_ID, "-"))


class RequestIds:
    """The outermost middleware: replies of the other middleware carry the header too."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
        request_id = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(12)}".encode()
        scope.setdefault("state", {})[REQUEST_ID] = request_id.decode()

        wire: Wire | None = scope["state"].get(WIRE)

        async def send_named(message: Message) -> None:
            if wire is not None and wire.is_closing:
                await wire.lost.wait()  # uvicorn does not know it yet, and would fail
                return
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        # uvicorn keeps its own scope, which still says HEAD, and sends only the head.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        await self._app(inner, receive, send_named)
