"""What tests of the server share: one scripted server per pytest worker, clients, and a patient httpx."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import openai
import pytest
from httpx2 import _config
from httpx2._transports import default

from support.live_server import KEY, OTHER_KEY, PAGE, Live, live

# httpx gives up after five seconds, and on a busy machine a server may need more.
for _part in ("connect", "read", "write", "pool"):
    setattr(_config.DEFAULT_TIMEOUT_CONFIG, _part, 60.0)
# It reads the system's certificates for every ``httpx.get``, 30 ms each, and these servers use no TLS.
vars(default)["create_ssl_context"] = cache(_config.create_ssl_context)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Answers by script; see ``support.live_server``. Tests that end a server or need other options start their own."""
    log = tmp_path_factory.mktemp("server") / "log"
    with live(log, keys=[KEY, OTHER_KEY], allowed_origins=[PAGE, "http://localhost:3000/"]) as running:
        yield running
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="session")
def chance_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """The real engine over a model that writes random tokens: an answer has a form only if the grammar enforces it."""
    log = tmp_path_factory.mktemp("chance") / "log"
    with live(log, factory="support.chance_service:load", limits={"compile_timeout_s": 1.0}) as running:
        yield running
        assert "Traceback" not in log.read_text()


@pytest.fixture(scope="session")
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0, timeout=60)
