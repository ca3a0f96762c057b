"""Steps that are left between layers: other steps run in between, and the bits are those of a step at once."""

from __future__ import annotations

import pytest
import torch

from microscale.engine.config import EngineConfig
from microscale.engine.step.inputs import Chunk, build_batch
from microscale.models.batch import ForwardBatch, KvCache, LogitRows
from microscale.models.config import LayerKind
from microscale.models.decoder import Parted, run_through
from microscale.models.families import AnyModel
from support.loading import load_model

PAGE = 4
PAGES = 12


@pytest.fixture(scope="module", params=["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"])
def model(request: pytest.FixtureRequest) -> AnyModel:
    return load_model(EngineConfig(request.param, load_format="dummy", device="cpu", block_size=PAGE))


def batch(model: AnyModel, first_page: int, tokens: list[int], wanted: int) -> ForwardBatch:
    held = list(range(first_page, first_page + -(-len(tokens) // PAGE)))
    return build_batch([Chunk(tokens, 0, dict.fromkeys(LayerKind, held), wanted)], PAGE, model.device)


def cache(model: AnyModel) -> KvCache:
    return model.new_cache(dict.fromkeys(LayerKind, PAGES))


@pytest.mark.parametrize("all_rows", [True, False])
@torch.inference_mode()
def test_other_steps_run_between_the_layers_of_one(model: AnyModel, all_rows: bool) -> None:
    one, other = list(range(3, 12)), list(range(40, 45))
    steps = [batch(model, 0, one, 1), batch(model, 4, other, 1)]
    if all_rows:
        steps = [ForwardBatch(s.token_ids, s.positions, s.attention, s.slots, None) for s in steps]
    assert all(isinstance(step.logits, LogitRows) != all_rows for step in steps)
    expected = [model.forward(step, cache(model)).values for step in steps]
    kv = cache(model)
    work = model.forward_parts(steps[0], kv)
    for _ in range(len(model.layers) - 1):
        next(work)
        assert torch.equal(model.forward(steps[1], kv).values, expected[1])
    assert torch.equal(run_through(work).values, expected[0])


@torch.inference_mode()
def test_a_body_has_a_place_to_leave_behind_every_layer_but_the_last(model: AnyModel) -> None:
    def places(work: Parted[object]) -> int:
        return sum(1 for _ in work)

    step, kv = batch(model, 0, list(range(9)), 1), cache(model)
    assert places(model.body_parts(step, kv)) == places(model.forward_parts(step, kv)) == len(model.layers) - 1
    q, x = run_through(model.body_parts(step, kv))
    for found, wanted in zip((q, x), model.body(step, cache(model)), strict=True):
        assert torch.equal(found, wanted)
