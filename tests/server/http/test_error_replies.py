"""Errors as clients see them: every class has an entry, and a bug of the server reveals nothing."""

from __future__ import annotations

import json

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from microscale import errors as base
from microscale.errors import MicroscaleError
from microscale.server.app import add_error_handlers
from microscale.server.http.error_replies import ERRORS

SECRET = "a path and a prompt"


def test_every_error_of_the_engine_has_an_entry_of_its_own() -> None:
    kinds = [kind for kind in vars(base).values() if isinstance(kind, type) and issubclass(kind, MicroscaleError)]
    assert kinds
    assert not [kind.__name__ for kind in kinds if kind not in ERRORS]


@pytest.mark.parametrize(
    ("path", "kind", "code"),
    [("/v1/chat/completions", "server_error", "internal"), ("/v1/messages", "api_error", None)],
)
def test_a_bug_is_reported_in_the_shape_of_the_api(path: str, kind: str, code: str | None) -> None:
    app = FastAPI()
    add_error_handlers(app)

    async def fail() -> None:
        raise ZeroDivisionError(SECRET)

    app.post(path)(fail)
    reply = TestClient(app, raise_server_exceptions=False).post(path, json={})
    body = reply.json()
    assert reply.status_code == 500
    assert body["error"]["message"] == "Internal server error: ZeroDivisionError."
    assert (body["error"]["type"], body["error"].get("code")) == (kind, code)
    assert SECRET not in json.dumps(body)
