"""Routes that report on the server itself: health, load, version, plan, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.responses import Response

from microscale.errors import EngineDied, MicroscaleError
from microscale.server.host import Host
from microscale.server.http.encoding import json_response
from microscale.version import __version__


class PlanReply(Struct, frozen=True):
    model: str
    vocab_size: int
    max_model_len: int
    plan: str
    """Which kernel runs what, as a table."""
    start_s: Mapping[str, float]
    """Seconds per part of the engine's start: process, loading, the rest."""
    gpu: str | UnsetType = UNSET
    precision: str | UnsetType = UNSET
    precisions: Raw | UnsetType = UNSET
    """For each precision the predicted speed and the measured cost in quality."""
    precisions_line: str | UnsetType = UNSET
    """The same in a sentence."""
    decisions: Raw | UnsetType = UNSET
    """By op, layer kind and batch size: the kernel, and why each of the others does not run."""
    memory: Raw | UnsetType = UNSET
    """Bytes by what they hold."""
    predicted: Raw | UnsetType = UNSET
    """Tokens per second for several batch and prompt sizes, with 90 % intervals."""
    speculative: Raw | UnsetType = UNSET
    """The drafter, the predicted cost of a step with drafts, and the drafter's kernels if it has any."""


class _Document(Struct, frozen=True):
    """What ``engine/loading/description.py`` writes."""

    table: str
    gpu: str
    precision: str
    decisions: Raw
    memory: Raw
    precisions: Raw = Raw(b"[]")
    precisions_line: str = ""
    predicted: Raw = Raw(b"[]")
    speculative: Raw | UnsetType = UNSET


def plan_reply(host: Host) -> PlanReply:
    ready = host.engine.ready
    common = (host.names[0], ready.vocab_size, ready.max_model_len)
    try:
        document = msgspec.json.decode(ready.plan, type=_Document)
    except msgspec.DecodeError:
        # Another kind of engine, whose plan is only text.
        return PlanReply(*common, ready.plan, host.start_s)
    return PlanReply(
        *common, document.table, host.start_s, document.gpu, document.precision, document.precisions,
        document.precisions_line, document.decisions, document.memory, document.predicted, document.speculative,
    )  # fmt: skip


STATS_TIMEOUT_S = 5.0


class VersionReply(Struct, frozen=True):
    version: str


class ServerLoad(Struct, frozen=True):
    server_load: int
    """Requests in progress, under vLLM's name."""


class Health(Struct, frozen=True):
    status: str
    reason: str | UnsetType = UNSET


def add_monitoring(app: FastAPI, host: Host) -> None:
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
        return json_response(ServerLoad(host.num_open))

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
