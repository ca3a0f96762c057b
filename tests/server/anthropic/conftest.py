"""In this folder, ``client`` is Anthropic's."""

from __future__ import annotations

import anthropic
import pytest

from support.live_server import KEY, Live


@pytest.fixture(scope="session")
def client(server: Live) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0, timeout=60)
