"""Whose sampling parameters count: the request's, then the model's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import openai
import pytest

from microscale.server.generation.engine_requests import sampling_params
from microscale.server.options import RequestLimits, SamplingDefaults
from microscale.server.requests.sampling import SamplingFields
from support.live_server import KEY, live

OWN: dict[str, Any] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("given", "changed"),
    [
        ({}, {}),
        ({"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}, None),
        ({"repeat_penalty": 1.3, "top_k": -1}, {"repetition_penalty": 1.3, "top_k": -1}),
    ],
)
def test_what_a_request_gives_wins_over_the_models_defaults(
    given: dict[str, Any], changed: dict[str, float] | None
) -> None:
    host = cast("Any", SimpleNamespace(max_model_len=100, limits=RequestLimits(), sampling=SamplingDefaults(**OWN)))
    params = sampling_params(SamplingFields(**given), 10, host, None, None)
    expected = given if changed is None else OWN | changed
    assert {name: getattr(params, name) for name in OWN} == expected


def test_a_server_reports_its_defaults(tmp_path: Path) -> None:
    with live(tmp_path / "log", sampling=OWN) as server:
        (model, _) = httpx2.get(f"{server.v1}/models", headers={"Authorization": f"Bearer {KEY}"}).json()["data"]
        assert model["sampling_defaults"] == OWN
        client = openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)
        reply = client.responses.create(model="scripted", input="Hi", top_p=0.5, max_output_tokens=4)
        assert (reply.temperature, reply.top_p) == (0.6, 0.5)
