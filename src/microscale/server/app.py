"""The application: middleware, routes, error replies, and the task that answers one request.

    RunningReply ── work(exchange) ──► JSON at once, or events as they come
              └──── receive() ───────► the client has disconnected: the work is cancelled, which aborts it in the engine

An error becomes a status before the reply has begun, and an event after. Each request gets one log line.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from microscale.errors import MicroscaleError
from microscale.server import error_texts
from microscale.server.anthropic import error_replies as anthropic_errors
from microscale.server.anthropic.handler import count_tokens, messages
from microscale.server.host import Host
from microscale.server.http.auth import AllowedHosts, ApiKeys, owner_of
from microscale.server.http.cors import Cors
from microscale.server.http.error_replies import code_of, error_reply, reply_json
from microscale.server.http.exchange import Exchange, Record
from microscale.server.http.read_body import read_body
from microscale.server.http.request_id import RequestIds, request_id_of
from microscale.server.monitoring.routes import add_monitoring
from microscale.server.openai.chat.handler import chat
from microscale.server.openai.completions.handler import complete
from microscale.server.openai.models import add_models
from microscale.server.openai.responses.handler import count_input, respond
from microscale.server.openai.responses.stored_routes import add_stored_responses
from microscale.server.openai.tokenize import detokenize, tokenize
from microscale.server.web.docs import add_docs
from microscale.server.web.openapi import describe
from microscale.server.web.pages import PAGES, add_pages
from microscale.version import __version__

log = logging.getLogger(__name__)
Work = Callable[[Host, bytes, Exchange], Awaitable[None]]
KEYLESS = frozenset({"/health", "/ping", *PAGES})
"""Paths that need no key. A load balancer has none; a browser sends none for a page, and the page then asks for it."""
CLIENT_DISCONNECTED = 499
"""The status in the log for a client that disconnected; it gets none."""


def make_app(host: Host) -> FastAPI:
    """The application; its state is ``host``."""
    # FastAPI's own documentation pages would load scripts from elsewhere.
    app = FastAPI(title="Microscale", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.add_middleware(ApiKeys, keys=host.keys, refuse=error_response, keyless=KEYLESS)
    if not host.keys:
        app.add_middleware(AllowedHosts, allowed=host.allowed_hosts, refuse=error_response)
    if host.allowed_origins:
        app.add_middleware(Cors, origins=host.allowed_origins)
    app.add_middleware(RequestIds)
    add_error_handlers(app)
    _add_generation(app, host)
    add_stored_responses(app, host)
    add_monitoring(app, host)
    add_models(app, host)
    add_pages(app)
    describe(app)
    add_docs(app)
    return app


def _add_generation(app: FastAPI, host: Host) -> None:
    for path, work in (
        ("/v1/completions", complete),
        ("/v1/chat/completions", chat),
        ("/v1/responses", respond),
        ("/v1/responses/input_tokens", count_input),
        ("/v1/messages", messages),
        ("/v1/messages/count_tokens", count_tokens),
        ("/tokenize", tokenize),
        ("/detokenize", detokenize),
    ):
        app.add_api_route(path, _endpoint(host, path, work), methods=["POST"], response_model=None)


def _endpoint(host: Host, path: str, work: Work) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = await read_body(request, host.limits)
        return RunningReply(host, path, partial(work, host, body))

    return endpoint


class RunningReply(Response):
    """A reply that is computed while it is sent, and cancelled when its client disconnects."""

    def __init__(self, host: Host, route: str, work: Callable[[Exchange], Awaitable[None]]) -> None:
        super().__init__()
        self._host = host
        self._record = Record(route)
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._record.owner = owner_of(scope)
        address, _ = scope.get("client") or ("", 0)
        self._record.client_id = request_id_of(scope)
        kind = anthropic_errors.AnthropicExchange if self._record.route.startswith(anthropic_errors.ROUTE) else Exchange
        exchange = kind(scope, send, self._record)
        self._host.num_open += 1
        work = asyncio.create_task(self._run(exchange, self._record.owner or address))
        gone = asyncio.create_task(_wait_disconnected(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._host.num_open -= 1
            gone.cancel()
            disconnected = not work.done()
            if disconnected:
                work.cancel()
                await asyncio.wait((work,))
            total_s = time.perf_counter() - self._record.started
            if self._record.completion_tokens:
                self._host.metrics.whole.observe(total_s)
            log.info("%s", self._record.line(CLIENT_DISCONNECTED if disconnected else exchange.status, total_s))
        if not disconnected:
            work.result()  # an error that could not be sent to the client is raised to uvicorn

    async def _run(self, exchange: Exchange, client: str) -> None:
        try:
            with self._host.admit(client):
                await self._work(exchange)
        except MicroscaleError as error:
            await self._send_error(exchange, error)
        except Exception as error:  # a bug of ours gets a reply too, so that no client waits forever
            log.exception("A request failed.")
            await self._send_error(exchange, error_texts.internal(error))

    async def _send_error(self, exchange: Exchange, error: MicroscaleError) -> None:
        self._host.metrics.failed(code_of(error))
        await exchange.error(error)


async def _wait_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# ---- errors, in the shape of the API that the request uses -----------------------------------------------------------


def error_response(error: MicroscaleError, scope: Scope) -> Response:
    """The reply for an error that was raised on purpose."""
    is_anthropic = anthropic_errors.speaks_anthropic(scope)
    reply = anthropic_errors.error_reply(error, request_id_of(scope)) if is_anthropic else error_reply(error)
    return Response(*reply, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(MicroscaleError)
    async def on_purpose(request: Request, error: MicroscaleError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(HTTPException)
    async def by_framework(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        if anthropic_errors.speaks_anthropic(request.scope):
            body = anthropic_errors.reply_json(message, error.status_code, request_id_of(request.scope))
        else:
            body = reply_json(message, "invalid_request_error", str(error.detail).lower().replace(" ", "_"))
        return Response(body, error.status_code, error.headers, "application/json")

    @app.exception_handler(ClientDisconnect)
    async def by_leaving(request: Request, error: ClientDisconnect) -> Response:
        """The client has left before its body was complete. Nobody gets this reply."""
        return Response(status_code=CLIENT_DISCONNECTED)

    @app.exception_handler(Exception)
    async def by_bug(request: Request, error: Exception) -> Response:
        return error_response(error_texts.internal(error), request.scope)
