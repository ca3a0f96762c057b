"""The application: middleware and routes. What is behind a route has a module of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from fastapi import FastAPI, Request
from starlette.responses import Response

from microscale.server.answer import Answer
from microscale.server.anthropic.handler import count_tokens, messages
from microscale.server.error_replies import add_error_handlers, error_response
from microscale.server.host import Host
from microscale.server.http.auth import AllowedHosts, ApiKeys
from microscale.server.http.body import read_body
from microscale.server.http.cors import Cors
from microscale.server.http.exchange import Exchange
from microscale.server.http.request_id import RequestIds
from microscale.server.openai.chat.handler import chat
from microscale.server.openai.completions.handler import complete
from microscale.server.openai.models import add_models
from microscale.server.openai.responses.handler import count_input, respond
from microscale.server.openai.responses.stored_routes import add_stored_responses
from microscale.server.openai.tokenize import detokenize, tokenize
from microscale.server.openapi import describe
from microscale.server.status import add_status
from microscale.server.web.docs import add_docs
from microscale.server.web.pages import PAGES, add_pages
from microscale.version import __version__

Work = Callable[[Host, bytes, Exchange], Awaitable[None]]
KEYLESS = frozenset({"/health", "/ping", *PAGES})
"""Paths that need no key. A load balancer has none; the web page asks for it, since a browser sends none for a page."""


def make_app(host: Host) -> FastAPI:
    """The application; its state is ``host``."""
    # No page of the framework's: it would load scripts from elsewhere.
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
    add_status(app, host)
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
        return Answer(host, path, partial(work, host, body))

    return endpoint
