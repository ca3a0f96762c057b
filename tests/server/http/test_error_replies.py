"""A mistake of the server's own: the client hears of it in the shape of its API, and nothing of what was inside."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI

from microscale.server.app import add_error_handlers

SECRET = "a path and a prompt"


def app() -> FastAPI:
    made = FastAPI()
    add_error_handlers(made)

    async def fail() -> None:
        raise ZeroDivisionError(SECRET)

    for path in ("/v1/chat/completions", "/v1/messages"):
        made.post(path)(fail)
    return made


def post(path: str) -> tuple[int, Any]:
    """Status and body, straight through the application: the error itself is raised again for the server's log."""
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http", "server": ("localhost", 80)}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def ask() -> None:
        with pytest.raises(ZeroDivisionError):
            await app()(scope, receive, send)

    asyncio.run(ask())
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_openais_shape() -> None:
    status, body = post("/v1/chat/completions")
    assert status == 500
    assert body["error"]["message"] == "The server made a mistake: ZeroDivisionError."
    assert (body["error"]["type"], body["error"]["code"]) == ("server_error", "internal")
    assert SECRET not in json.dumps(body)


def test_anthropics_shape() -> None:
    status, body = post("/v1/messages")
    assert status == 500
    assert (body["type"], body["error"]["type"]) == ("error", "api_error")
    assert body["error"]["message"] == "The server made a mistake: ZeroDivisionError."
    assert SECRET not in json.dumps(body)
