"""Responses that were kept: fetched, listed, deleted. No query parameter changes what was answered."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import FastAPI, Request
from starlette.responses import Response

from microscale.server.host import Host
from microscale.server.http.connection import owner_of
from microscale.server.http.encoding import encode
from microscale.server.http.error_replies import BadField, NoSuchItem
from microscale.server.openai.responses.convert import shown
from microscale.server.openai.responses.replies import Deleted, ItemList
from microscale.server.openai.responses.store import KeptItem
from microscale.server.requests.body import IGNORED_HEADER, NAME, Ignored, ignored_header

MOST_LISTED = 100
DEFAULT_LISTED = 20
HARMLESS = ("include", "include_obfuscation")
"""Nothing that they name is left out, or padded, anyway."""


def add_stored_responses(app: FastAPI, host: Host) -> None:
    @app.get("/v1/responses/{response_id}", response_model=None)
    async def kept_response(response_id: str, request: Request) -> Response:
        kept = host.stored.get(response_id, owner_of(request.scope))
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise BadField("stream: a response that was kept is returned whole.", "stream", "unsupported_value")
        if "starting_after" in request.query_params:
            raise BadField(
                "starting_after: is a place in a stream, and a response that was kept is returned whole.",
                "starting_after",
                "unsupported_parameter",
            )
        return _reply(host, kept.reply, request, ("stream",))

    @app.get("/v1/responses/{response_id}/input_items", response_model=None)
    async def input_items(response_id: str, request: Request) -> Response:
        kept = host.stored.get(response_id, owner_of(request.scope))
        listed = _page(kept.items[: kept.num_input], request)
        return _reply(host, encode(listed), request, ("limit", "order", "after"))

    @app.post("/v1/responses/{response_id}/cancel", response_model=None)
    async def cancel(response_id: str, request: Request) -> Response:
        host.stored.get(response_id, owner_of(request.scope))
        told = "Only responses that run in the background can be cancelled, and none does here: hang up instead."
        raise BadField(told, None, "unsupported_value")

    @app.delete("/v1/responses/{response_id}", response_model=None)
    async def delete_response(response_id: str, request: Request) -> Response:
        host.stored.delete(response_id, owner_of(request.scope))
        return Response(encode(Deleted(response_id)), media_type="application/json")


def _page(items: Sequence[KeptItem], request: Request) -> ItemList:
    asked = request.query_params
    limit = asked.get("limit", str(DEFAULT_LISTED))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 9 and 1 <= int(limit) <= MOST_LISTED):
        raise BadField(f"limit must be a number from 1 to {MOST_LISTED}.", "limit")
    order = asked.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadField("order must be asc or desc.", "order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    after = asked.get("after")
    if after is not None:
        places = [at for at, item in enumerate(ordered) if item.id == after]
        if not places:
            raise NoSuchItem(f"after: the response has no input item {after[:64]!r}.")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    data = [_listed(item) for item in page]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return ItemList(data, first, last, len(ordered) > len(page))


def _listed(kept: KeptItem) -> dict[str, object]:
    """An item as OpenAI lists it: with its id and type, and text in parts."""
    item = {"type": "message", **shown(kept.item), "id": kept.id}
    if item["type"] == "message" and isinstance(item.get("content"), str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": kind, "text": item["content"]}]
    return {"status": "completed", **item} if item["type"] != "reasoning" else item


def _reply(host: Host, data: bytes, request: Request, read: Sequence[str]) -> Response:
    """A JSON answer. Parameters that nothing reads are named in its head."""
    names = dict.fromkeys(name.removesuffix("[]") for name in request.query_params)
    # They go into a header and into the log; who sends them chooses them.
    ignored = [Ignored(name if NAME.fullmatch(name) else "?", name in HARMLESS) for name in names if name not in read]
    headers = {}
    if ignored:
        host.ignored.tell(ignored)
        headers[IGNORED_HEADER] = ignored_header(ignored)
    return Response(data, headers=headers, media_type="application/json")
