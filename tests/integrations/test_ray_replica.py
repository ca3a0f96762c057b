"""A replica as Ray drives it, without Ray: answers in pieces, a client that leaves, an engine that dies."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from microscale.errors import EngineDied
from microscale.integrations.ray_serve_options import read_options
from microscale.integrations.ray_serve_replica import OURS, RAYS, UNGATHERED, Replica, log_with_ray
from microscale.integrations.ray_serve_request import ReplyHead, RoutedRequest, plain_scope

ARGS = {"model": "gpt-oss-tiny", "load_format": "dummy", "device": "cpu", "threads": 1, "max_model_len": 4096}
LONG = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def _loggers() -> Iterator[None]:
    """A replica has a process of its own, whose loggers it may change."""
    ours = logging.getLogger(OURS)
    before = (ours.handlers, ours.propagate, ours.level)
    yield
    ours.handlers, ours.propagate, ours.level = before


def asked(path: str, body: dict[str, Any] | None = None) -> RoutedRequest:
    data = b"" if body is None else json.dumps(body).encode()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    method = "GET" if body is None else "POST"
    scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": method, "scheme": "http", "path": path}
    scope |= {"query_string": b"", "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 8000)}
    return RoutedRequest(plain_scope(scope, headers), data)


async def whole(replica: Replica, request: RoutedRequest) -> tuple[int, bytes]:
    pieces = [piece async for piece in replica.answer(request)]
    assert isinstance(pieces[0], ReplyHead)
    assert all(isinstance(piece, bytes) for piece in pieces[1:])
    return pieces[0].status, b"".join(piece for piece in pieces[1:] if isinstance(piece, bytes))


async def running(replica: Replica) -> int:
    stats = await replica._host.engine.stats()
    return stats.num_running + stats.num_waiting


async def life() -> None:
    replica: Replica = Replica.__new__(Replica)
    await replica.__init__(read_options(ARGS))  # type: ignore[misc]
    await replica.check_health()
    status, body = await whole(replica, asked("/health"))
    assert (status, json.loads(body)) == (200, {"status": "ok"})
    short = {"prompt": "a", "max_tokens": 5, "ignore_eos": True}
    status, body = await whole(replica, asked("/v1/completions", short))
    assert json.loads(body)["usage"]["completion_tokens"] == 5
    status, body = await whole(replica, asked("/v1/completions", {**short, "stream": True}))
    assert (status, body.startswith(b"data: {"), body.endswith(b"data: [DONE]\n\n")) == (200, True, True)
    assert (await whole(replica, asked("/v1/completions", {"prompt": 5.5})))[0] == 400

    # A minute between messages: all that comes after the first token goes out at the end.
    replica._messages_per_s = 1 / 60
    many = {**short, "max_tokens": 50, "stream": True}
    pieces = [piece async for piece in replica.answer(asked("/v1/completions", many))]
    assert len(pieces) <= UNGATHERED + 1
    assert str(pieces[-1]).count("data: ") > 10
    replica._messages_per_s = 1e9

    left = replica.answer(asked("/v1/completions", LONG))
    assert isinstance(await anext(left), ReplyHead)
    await anext(left)
    assert await running(replica) == 1
    await left.aclose()  # type: ignore[attr-defined]
    assert await running(replica) == 0, "the engine computes for nobody"

    broken = replica.answer(asked("/v1/completions", LONG))
    await anext(broken)
    os.kill(replica._host.engine.pid, signal.SIGKILL)
    rest = b"".join([piece async for piece in broken if isinstance(piece, bytes)])
    assert b'"code":"engine_died"' in rest
    assert b"[DONE]" not in rest
    await asyncio.wait((replica._watching,))
    with pytest.raises(EngineDied):
        await replica.check_health()
    assert (await whole(replica, asked("/v1/completions", short)))[0] == 503
    await replica.__del__()


@pytest.mark.filterwarnings("ignore:coroutine .Replica.__del__")
def test_the_life_of_a_replica() -> None:
    asyncio.run(life())


def test_a_path_before_ours_is_taken_off() -> None:
    scope = {"type": "http", "path": "/llm/v1/models", "root_path": "/llm", "extensions": object()}
    made = plain_scope(scope, [])
    assert (made["path"], made["root_path"], "extensions" in made) == ("/v1/models", "", False)
    assert plain_scope({**scope, "path": "/llm"}, [])["path"] == "/"


def test_we_log_where_ray_does() -> None:
    handler = logging.NullHandler()
    logging.getLogger(RAYS).addHandler(handler)
    try:
        log_with_ray()
        assert logging.getLogger(OURS).handlers == [handler]
    finally:
        logging.getLogger(RAYS).removeHandler(handler)
