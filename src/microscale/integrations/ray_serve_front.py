"""The front: reads a request, has the router choose a replica, and passes the answer on as it arrives.

    client ══ Ray's proxy ══ Front ── router ══ Replica (application, engine)

If a replica is lost before its answer has begun, the request goes to another one and the client notices nothing. After
that, the stream ends with an error event in the API's own shape. The replica's application checks API keys; the front
only avoids reading the body of a request without a valid key.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import OrderedDict
from typing import Any

import msgspec
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from microscale.errors import EngineDied, MicroscaleError, QueueFull
from microscale.integrations.prefix_routing import chain_of
from microscale.integrations.ray_serve_options import RayOptions
from microscale.integrations.ray_serve_replica import log_with_ray
from microscale.integrations.ray_serve_request import ReplyHead, RoutedRequest, plain_scope, prompt_text
from microscale.server import error_texts
from microscale.server.anthropic import error_replies as anthropic_errors
from microscale.server.app import error_response
from microscale.server.http.auth import ApiKeys, is_loopback
from microscale.server.http.error_replies import error_reply
from microscale.server.http.exchange import event_bytes
from microscale.server.http.read_body import read_body

log = logging.getLogger(__name__)
TRIES = 3
"""Replicas that a request is sent to before its client gets an error."""
UNAVAILABLE = (503, anthropic_errors.OVERLOADED)
"""Statuses of a replica that has lost its engine, drains, or has no pages."""
REPLACED = {b"content-encoding", b"content-length", b"transfer-encoding"}
"""Headers of the body as it arrived; it is passed on decompressed."""
BY_RAY = b"x-request-id"
"""Ray's proxy adds this header to every answer, with the value that the application's has."""
REPLICA = b"x-microscale-replica"
"""A header of answers: Ray's id of the replica, which is also in the name of its log."""
RESPONSES = "/v1/responses"
RESPONSE_ID = re.compile(rb'"id": ?"(resp_[0-9a-f]+)"')
MAX_HOMES = 2**16
"""Maximum number of stored responses whose replica a front remembers: a replica stores a thousand."""


class Front:
    """One of ``front_replicas`` processes. It also remembers which replica stores which response."""

    def __init__(self, replicas: DeploymentHandle, options: RayOptions) -> None:
        log_with_ray()
        self._replicas = replicas.options(stream=True)
        self._options = options
        self._homes: OrderedDict[bytes, Any] = OrderedDict()
        """Response → replica, the oldest first."""
        self._keys = ApiKeys(self.relay, options.keys, error_response) if options.keys else None

    async def __call__(self, request: Request) -> Response:
        return _Relay(self)

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application."""
        try:
            routed = await self._read(scope, receive)
        except MicroscaleError as error:
            await error_response(error, scope)(scope, receive, send)
            return
        work = asyncio.create_task(self._answer(routed, _Reply(routed.scope, send)))
        gone = asyncio.create_task(_wait_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
        if not work.cancelled():
            work.result()

    async def _read(self, scope: Scope, receive: Receive) -> RoutedRequest:
        request = Request(scope, receive)
        address = (scope.get("server") or ("",))[0]
        if self._keys is None and not self._options.deployed.allow_without_key and not is_loopback(address):
            raise error_texts.keyless_from_elsewhere()
        is_json = request.headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
        headers = list(scope["headers"])
        body = b""
        if is_json and (self._keys is None or self._keys.owner(scope) is not None):
            body = await read_body(request, self._options.limits)
            headers = [(name, value) for name, value in headers if name not in REPLACED]
            headers.append((b"content-length", b"%d" % len(body)))
        plain = plain_scope(scope, headers)
        return RoutedRequest(
            plain, body, chain_of(prompt_text(body)), self._homes.get(named_response(plain["path"], body))
        )

    async def _answer(self, routed: RoutedRequest, reply: _Reply) -> None:
        error: MicroscaleError = EngineDied(f"{TRIES} replicas could not answer this request.")
        for attempt in range(TRIES):
            try:
                if await self._pass_on(routed, reply, last=attempt == TRIES - 1):
                    return
            except BackPressureError:
                error = QueueFull("All replicas are busy, and too many requests are waiting.")
                break
            except (RayError, RayServeException) as lost:
                log.warning("Replica %s is lost: %s", routed.replica, type(lost).__name__)
                if reply.begun:
                    error = EngineDied("The replica ended before its answer was complete.")
                    break
            routed.avoid.add(routed.replica)
        await reply.error(error)

    async def _pass_on(self, routed: RoutedRequest, reply: _Reply, *, last: bool) -> bool:
        """Pass on one replica's answer. False: there is none, and another replica should try."""
        pieces = self._replicas.answer.remote(routed)
        head: ReplyHead | None = None
        whole: list[bytes] = []
        try:
            async for piece in pieces:
                if isinstance(piece, ReplyHead):
                    head = ReplyHead(piece.status, [*piece.headers, _named(routed)])
                elif head is not None and _is_stream(head):
                    self._note_home(routed, piece)
                    await reply.stream(head, piece)
                else:
                    whole.append(piece)  # sent when complete: until then another replica can take over
        finally:
            pieces.cancel()  # does nothing if it has ended
        if head is None or (head.status in UNAVAILABLE and not last):
            return False
        self._note_home(routed, b"".join(whole))
        await reply.end(head, b"".join(whole))
        return True

    def _note_home(self, routed: RoutedRequest, piece: bytes) -> None:
        """Remember the replica of a response: its id is the first in ``piece``."""
        if routed.scope["path"] != RESPONSES or (match := RESPONSE_ID.search(piece)) is None:
            return
        self._homes.setdefault(match[1], routed.replica)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)


class _Relay(Response):
    """The reply that Ray gets; Ray calls it with the connection."""

    def __init__(self, front: Front) -> None:
        super().__init__()
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._front.relay(scope, receive, send)


class _Reply:
    """The client's side of one answer."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.begun = False
        self._scope = scope
        self._send = send

    async def stream(self, head: ReplyHead, piece: bytes) -> None:
        await self._begin(head)
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, head: ReplyHead, rest: bytes) -> None:
        await self._begin(head)
        await self._send({"type": "http.response.body", "body": rest, "more_body": False})

    async def error(self, error: MicroscaleError) -> None:
        """Send an error: as a status, or as an event if the reply has begun."""
        if self.begun:
            if anthropic_errors.speaks_anthropic(self._scope):
                event = event_bytes(anthropic_errors.error_reply(error, "-")[0], b"error")
            else:
                event = event_bytes(error_reply(error)[0])
            await self._send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            response = error_response(error, self._scope)
            await self.end(ReplyHead(response.status_code, response.raw_headers), bytes(response.body))

    async def _begin(self, head: ReplyHead) -> None:
        if not self.begun:
            self.begun = True
            headers = [(name, value) for name, value in head.headers if name != BY_RAY]
            await self._send({"type": "http.response.start", "status": head.status, "headers": headers})


class _Continues(msgspec.Struct):
    previous_response_id: str | None = None


def named_response(path: str, body: bytes) -> bytes:
    """The id of the response that a request fetches or continues; empty if there is none."""
    if not path.startswith(RESPONSES):
        return b""
    if body:
        try:
            return (msgspec.json.decode(body, type=_Continues).previous_response_id or "").encode()
        except (msgspec.DecodeError, UnicodeError):
            return b""  # the replica replies with the error
    return path.removeprefix(RESPONSES).strip("/").partition("/")[0].encode()


def _named(routed: RoutedRequest) -> tuple[bytes, bytes]:
    return REPLICA, str(getattr(routed.replica, "unique_id", "-")).encode()


def _is_stream(head: ReplyHead) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head.headers)


async def _wait_gone(receive: Receive) -> Any:
    while (await receive())["type"] != "http.disconnect":
        pass
