"""The routes. What is behind them stands in modules of its own; here are paths, keys and the shape of errors."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI, Request
from msgspec import UNSET, Struct
from starlette.exceptions import HTTPException
from starlette.responses import Response

from microscale.errors import EngineDied, MicroscaleError
from microscale.server.answer import Answer, Exchange
from microscale.server.anthropic.errors import reply_json as anthropic_json
from microscale.server.anthropic.errors import speaks_anthropic
from microscale.server.anthropic.messages import count_tokens, messages
from microscale.server.chat import chat
from microscale.server.completions import complete
from microscale.server.docs import add_docs
from microscale.server.doors import Keys, Names, error_response
from microscale.server.faults import reply_json
from microscale.server.host import Host
from microscale.server.http.body import read_body
from microscale.server.http.cors import Cors
from microscale.server.http.manners import Manners, request_id_of
from microscale.server.openai.response_routes import add_stored_responses
from microscale.server.openapi import describe
from microscale.server.pages import add_pages
from microscale.server.plan import plan_reply
from microscale.server.replies import Health, Load, Model, ModelList, VersionReply, encode
from microscale.server.responses import count_input, respond
from microscale.server.tokens import detokenize, tokenize
from microscale.version import __version__

Work = Callable[[Host, bytes, Exchange], Awaitable[None]]
STATS_TIMEOUT_S = 5.0


def _reply(value: Struct, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def _model(host: Host, name: str) -> Model:
    created = datetime.datetime.fromtimestamp(host.created, datetime.UTC).isoformat().replace("+00:00", "Z")
    most = host.max_model_len
    return Model(name, host.created, most, name, created, max_input_tokens=most - 1, max_tokens=most - 1)


def make_app(host: Host) -> FastAPI:
    """The application; its state is ``host``."""
    # No page of the framework's: it would load scripts from elsewhere.
    app = FastAPI(title="Microscale", version=__version__, docs_url=None, redoc_url=None, openapi_url="/openapi.json")
    app.add_middleware(Keys, keys=host.keys)
    if not host.keys:
        app.add_middleware(Names, allowed=host.allowed_hosts)
    if host.allowed_origins:
        app.add_middleware(Cors, origins=host.allowed_origins)
    app.add_middleware(Manners)
    _add_errors(app)
    _add_generation(app, host)
    add_stored_responses(app, host)
    _add_facts(app, host)
    add_pages(app)
    describe(app)
    add_docs(app)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(MicroscaleError)
    async def on_purpose(request: Request, error: MicroscaleError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(HTTPException)
    async def by_framework(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}."
        if speaks_anthropic(request.scope):
            body = anthropic_json(message, error.status_code, request_id_of(request.scope))
        else:
            body = reply_json(message, "invalid_request_error", str(error.detail).lower().replace(" ", "_"))
        return Response(body, error.status_code, error.headers, "application/json")

    @app.exception_handler(Exception)
    async def by_mistake(request: Request, error: Exception) -> Response:
        message = f"The server made a mistake: {type(error).__name__}."
        if speaks_anthropic(request.scope):
            body = anthropic_json(message, 500, request_id_of(request.scope))
        else:
            body = reply_json(message, "server_error", "internal")
        return Response(body, 500, media_type="application/json")


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
        return Answer(host, path, partial(work, host, body))

    return endpoint


def _add_facts(app: FastAPI, host: Host) -> None:
    models = {name: _model(host, name) for name in host.names}

    @app.get("/ping", response_model=None)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        try:
            host.check_open()
        except MicroscaleError as error:
            return _reply(Health("unavailable", str(error)), 503)
        return _reply(Health("ok", UNSET))

    @app.get("/load", response_model=None)
    async def load() -> Response:
        return _reply(Load(host.num_open))

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return _reply(VersionReply(__version__))

    @app.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        return _reply(ModelList(list(models.values()), host.names[0], host.names[-1]))

    @app.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        return _reply(models[host.check_model(name)])

    @app.get("/plan", response_model=None)
    async def plan() -> Response:
        return _reply(plan_reply(host))

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await host.engine.stats()
        except (TimeoutError, EngineDied):
            stats = None
        return Response(host.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8")
