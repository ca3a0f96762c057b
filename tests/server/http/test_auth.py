"""Auth: keys and whose they are; without keys, the names that a local server answers to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from microscale.errors import MicroscaleError
from microscale.server.app import error_response
from microscale.server.error_texts import RequestError
from microscale.server.http.auth import AllowedHosts, ApiKeys, owner_of
from microscale.server.openai.responses.store import ResponseStore, StoredResponse
from microscale.server.options import RequestLimits


def call(
    auth: type[ApiKeys] | type[AllowedHosts], given: Any, headers: dict[str, str], server: str = "127.0.0.1"
) -> Any:
    """The status of a refusal, or the owner that the application behind it sees."""
    seen: list[str] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(owner_of(scope))

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/v1/models", "headers": pairs, "server": (server, 8000)}
    asyncio.run(auth(app, given, error_response)(scope, receive, send))
    return seen[0] if seen else sent[0]["status"]


def test_keys_have_owners_that_do_not_show_them() -> None:
    keys = (b"sk-a", b"sk-b")
    owners = [call(ApiKeys, keys, {"Authorization": f"Bearer {key.decode()}"}) for key in keys]
    assert len(set(owners)) == 2
    assert not any("sk-" in owner for owner in owners)
    for header in ("Bearer sk-c", "Bearer", "Basic sk-a", "", "Bearer sk-a sk-b"):
        assert call(ApiKeys, keys, {"Authorization": header}) == 401
    assert call(ApiKeys, (), {}) == ""


@pytest.mark.parametrize(
    "name",
    ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "::1", "a.localhost", "", "0.0.0.0:8000", "[::]"],
)
def test_this_machine_by_its_own_names(name: str) -> None:
    assert call(AllowedHosts, (), {"Host": name}) == ""


@pytest.mark.parametrize(
    "name", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "[::2]"]
)
def test_a_foreign_name_is_refused_on_the_loopback_address_alone(name: str) -> None:
    assert call(AllowedHosts, (), {"Host": name}) == 403
    assert call(AllowedHosts, (), {"Host": name}, server="::1") == 403
    assert call(AllowedHosts, ("*",), {"Host": name}) == ""
    assert call(AllowedHosts, (), {"Host": name}, server="192.168.0.7") == ""
    assert call(AllowedHosts, ("box.lan",), {"Host": "Box.lan:80"}) == ""


def test_what_one_keeps_is_nothing_to_another() -> None:
    store = ResponseStore()
    store.put("r", StoredResponse(b"{}", (), 0, "a"), RequestLimits())
    assert store.get("r", "a").reply == b"{}"
    for other in ("b", ""):
        with pytest.raises(RequestError, match=r"The response .* is not stored"):
            store.get("r", other)
        with pytest.raises(MicroscaleError):
            store.delete("r", other)
    store.delete("r", "a")
    assert len(store) == 0
