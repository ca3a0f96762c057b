"""Errors as replies, in the shape of the API that the request speaks."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from microscale.errors import MicroscaleError
from microscale.server.anthropic.errors import error_reply, speaks_anthropic
from microscale.server.anthropic.errors import reply_json as anthropic_json
from microscale.server.http.faults import error_headers, error_json, fault_of, reply_json
from microscale.server.http.request_id import request_id_of


def error_response(error: MicroscaleError, scope: Scope) -> Response:
    """An error that was raised on purpose, as a reply."""
    if speaks_anthropic(scope):
        body, status, headers = error_reply(error, request_id_of(scope))
        return Response(body, status, headers, "application/json")
    return Response(error_json(error), fault_of(error).status, error_headers(error), "application/json")


def add_error_handlers(app: FastAPI) -> None:
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
