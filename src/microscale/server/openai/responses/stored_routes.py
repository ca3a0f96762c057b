"""Routes for stored responses: fetch, list the input, cancel, delete."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response

from microscale.server import error_texts
from microscale.server.host import Host
from microscale.server.http.auth import owner_of
from microscale.server.http.encoding import encode
from microscale.server.openai.responses.replies import Deleted, ItemList
from microscale.server.openai.responses.store import StoredItem
from microscale.server.openai.responses.to_chat import shown
from microscale.server.requests.base import NAME, Ignored

MOST_LISTED = 100
DEFAULT_LISTED = 20
HARMLESS = ("include", "include_obfuscation")
"""Query parameters that change nothing: everything is included, and nothing is padded."""


def add_stored_responses(app: FastAPI, host: Host) -> None:
    @app.get("/v1/responses/{response_id}", response_model=None)
    async def stored_response(response_id: str, request: Request) -> Response:
        stored = host.stored.get(response_id, owner_of(request.scope))
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise error_texts.stored_response_not_streamed("stream", "unsupported_value")
        if "starting_after" in request.query_params:
            raise error_texts.stored_response_not_streamed("starting_after", "unsupported_parameter")
        return _reply(host, stored.reply, request, ("stream",))

    @app.get("/v1/responses/{response_id}/input_items", response_model=None)
    async def input_items(response_id: str, request: Request) -> Response:
        stored = host.stored.get(response_id, owner_of(request.scope))
        listed = _page(stored.items[: stored.num_input], request)
        return _reply(host, encode(listed), request, ("limit", "order", "after"))

    @app.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str, request: Request) -> Response:
        host.stored.get(response_id, owner_of(request.scope))
        raise error_texts.nothing_to_cancel()

    @app.delete("/v1/responses/{response_id}", response_model=None)
    async def delete_response(response_id: str, request: Request) -> Response:
        host.stored.delete(response_id, owner_of(request.scope))
        return Response(encode(Deleted(response_id)), media_type="application/json")


def _page(items: Sequence[StoredItem], request: Request) -> ItemList:
    asked = request.query_params
    limit = asked.get("limit", str(DEFAULT_LISTED))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= MOST_LISTED):
        raise error_texts.out_of_range("limit", f"a number from 1 to {MOST_LISTED}")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise error_texts.out_of_range("order", "asc or desc")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = asked.get("after")
    if after is not None:
        places = [at for at, item in enumerate(ordered) if item.id == after]
        if not places:
            raise error_texts.item_not_in_response(after)
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    data = [_listed(item) for item in page]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ItemList(data, first, last, len(ordered) > len(page))


def _listed(stored: StoredItem) -> dict[str, object]:
    """An item in OpenAI's list format: with its id and type, and text in parts."""
    item = {"type": "message", **shown(stored.item), "id": stored.id}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return {"status": "completed", **item} if item["type"] != "reasoning" else item


def _reply(host: Host, data: bytes, request: Request, read: Sequence[str]) -> Response:
    """A JSON reply. Query parameters that nothing reads are named in a header."""
    names = dict.fromkeys(name.removesuffix("[]") for name in request.query_params)
    # Clients choose these names, and they go into a header and into the log.
    ignored = [Ignored(name if NAME.fullmatch(name) else "?", name in HARMLESS) for name in names if name not in read]
    return Response(data, headers=host.ignored_headers(ignored), media_type="application/json")
