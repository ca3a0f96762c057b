"""The front by itself: whom it lets in, and which stored response a request is about. No cluster is started."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message

from microscale.integrations.ray_serve_front import Front, named_response
from microscale.integrations.ray_serve_options import read_options


class NoReplicas:
    """Stands where the handle is; a request that reaches it fails the test."""

    def options(self, **given: Any) -> NoReplicas:
        return self


def status_of(options: dict[str, Any], address: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, str]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "server": (address, 80)}
    front = Front(NoReplicas(), read_options({"device": "cpu", **options}))
    asyncio.run(front.relay(scope, receive, send))
    return sent[0]["status"], json.loads(sent[1]["body"])["error"]["code"]


@pytest.mark.parametrize("address", ["192.0.2.7", "2001:db8::1", ""])
def test_other_machines_are_refused_where_there_are_no_keys(address: str) -> None:
    assert status_of({}, address, []) == (403, "host_not_allowed")


def test_what_cannot_be_read_is_refused_here() -> None:
    json_type = (b"content-type", b"application/json")
    assert status_of({}, "127.0.0.1", [json_type, (b"content-encoding", b"zstd")]) == (415, "unknown_encoding")
    large = [json_type, (b"content-length", b"5000"), (b"expect", b"100-continue")]
    assert status_of({"max_body_bytes": 100, "allow_without_key": True}, "192.0.2.7", large) == (413, "body_too_large")


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", b'{"previous_response_id": "resp_1", "input": "a"}', b"resp_1"),
        ("/v1/responses", b'{"input": "a"}', b""),
        ("/v1/responses", b"no json", b""),
        ("/v1/responses/resp_2", b"", b"resp_2"),
        ("/v1/responses/resp_2/cancel", b"", b"resp_2"),
        ("/v1/responses/input_tokens", b'{"previous_response_id": "resp_3"}', b"resp_3"),
        ("/v1/chat/completions", b'{"previous_response_id": "resp_1"}', b""),
    ],
)
def test_which_response_a_request_is_about(path: str, body: bytes, name: bytes) -> None:
    assert named_response(path, body) == name
