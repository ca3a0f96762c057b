"""Routes that tell of the server itself: health, load, version, plan, metrics."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from msgspec import UNSET, Struct, UnsetType
from starlette.responses import Response

from microscale.errors import EngineDied, MicroscaleError
from microscale.server.encoding import json_response
from microscale.server.host import Host
from microscale.server.plan import plan_reply
from microscale.version import __version__

STATS_TIMEOUT_S = 5.0


class VersionReply(Struct, frozen=True):
    version: str


class Load(Struct, frozen=True):
    server_load: int
    """Requests that are being answered, under vLLM's name."""


class Health(Struct, frozen=True):
    status: str
    reason: str | UnsetType = UNSET


def add_status(app: FastAPI, host: Host) -> None:
    @app.get("/ping", response_model=None)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        try:
            host.check_open()
        except MicroscaleError as error:
            return json_response(Health("unavailable", str(error)), 503)
        return json_response(Health("ok", UNSET))

    @app.get("/load", response_model=None)
    async def load() -> Response:
        return json_response(Load(host.num_open))

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return json_response(VersionReply(__version__))

    @app.get("/plan", response_model=None)
    async def plan() -> Response:
        return json_response(plan_reply(host))

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        try:
            async with asyncio.timeout(STATS_TIMEOUT_S):
                stats = await host.engine.stats()
        except (TimeoutError, EngineDied):
            stats = None
        return Response(host.metrics.text(stats), media_type="text/plain; version=0.0.4; charset=utf-8")
