"""``/v1/models``: the names under which the model is served."""

from __future__ import annotations

import datetime

from fastapi import FastAPI
from msgspec import Struct
from starlette.responses import Response

from microscale.server.host import Host
from microscale.server.http.encoding import json_response
from microscale.server.options import SamplingDefaults


class ModelInfo(Struct, frozen=True):
    """The fields that OpenAI's and Anthropic's clients read."""

    id: str
    created: int
    max_model_len: int
    display_name: str
    created_at: str
    """``created`` in Anthropic's format, RFC 3339."""
    max_input_tokens: int
    max_tokens: int
    sampling_defaults: SamplingDefaults
    """For requests that do not choose it themselves: the model's own, from ``generation_config.json``."""
    object: str = "model"
    owned_by: str = "microscale"
    type: str = "model"
    lifecycle: str = "active"


class ModelList(Struct, frozen=True):
    data: list[ModelInfo]
    first_id: str
    last_id: str
    object: str = "list"
    has_more: bool = False


def _model(host: Host, name: str) -> ModelInfo:
    created = datetime.datetime.fromtimestamp(host.created, datetime.UTC).isoformat().replace("+00:00", "Z")
    most = host.max_model_len
    return ModelInfo(name, host.created, most, name, created, most - 1, most - 1, host.sampling)


def add_models(app: FastAPI, host: Host) -> None:
    models = {name: _model(host, name) for name in host.names}

    @app.get("/v1/models", response_model=None)
    async def list_models() -> Response:
        return json_response(ModelList(list(models.values()), host.names[0], host.names[-1]))

    @app.get("/v1/models/{name:path}", response_model=None)
    async def one_model(name: str) -> Response:
        return json_response(models[host.check_model(name)])
