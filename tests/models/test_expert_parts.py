"""Layers whose experts leave a token's sum to the norm behind them, on a CPU: the same bits as with sums of their own.

The kernels that leave it run on GPUs (``tests/gpu``). Here the experts of a small model answer expert by expert, and
all that reads such an answer is the models' own code: the next layer, the last norm, taps, and the tail for few rows.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.hardware import known
from microscale.kernels.moe.spec import Parts, Routing
from microscale.models.config import LayerKind
from microscale.models.families import PRESETS, AnyModel
from microscale.models.recorded import Step, bind_shapes
from microscale.models.taps import Taps
from microscale.planning.ops import Activations, Ops, Preference, recording
from microscale.planning.ranks import NoSums
from microscale_lab.batches import SequenceChunk, build_batch
from support.forced_routing import replaced
from support.forward import poison
from support.loading import load_model

SHAPES: dict[str, dict[str, object]] = {
    "gpt-oss-20b": {"num_local_experts": 16, "intermediate_size": 128},
    "qwen3-30b-a3b": {"num_experts": 16, "moe_intermediate_size": 64, "eos_token_id": [1]},
}
SMALL = {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MOST = 20
"""Tokens up to which the experts leave the sum."""


@cache
def load(name: str) -> AnyModel:
    overrides = SMALL | {"vocab_size": 256} | SHAPES[name]
    options = EngineConfig(
        name, load_format="dummy", device="cpu", dtype="bfloat16", backend="reference", hf_overrides=overrides
    )
    return load_model(options)


class ByExpert:
    """The experts of a layer one after the other: their answers, or the sum of them."""

    def __init__(self, experts: Any, most: int) -> None:
        self._experts, self._most = experts, most
        self.left: list[int] = []
        """Tokens of each answer whose sum was left."""

    def why_not_parts(self, tokens: int) -> str | None:
        return None if tokens <= self._most else "too many"

    def parts(self, x: Tensor, routing: Routing) -> Parts:
        self.left.append(len(x))
        return self._answers(x, routing)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        return self._answers(x, routing).summed(x.dtype)

    def _answers(self, x: Tensor, routing: Routing) -> Parts:
        tokens, top_k = routing.expert_ids.shape
        pairs = zip(routing.expert_ids.split(1, dim=1), routing.weights.split(1, dim=1), strict=True)
        each = [self._experts(x, Routing(ids, weights)).float() for ids, weights in pairs]
        return Parts(torch.stack(each, dim=1).view(tokens * top_k, -1), top_k)


def run(model: AnyModel, most: int, rows: int | None, ranks: object = None) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Logits and taps of steps of 40, 7 and 3 tokens, and what each layer left. ``rows``: of logits that each sequence
    wants."""
    layers: Any = model.layers
    experts = [ByExpert(layer.experts, most) for layer in layers]
    kv = poison(model.new_cache(dict.fromkeys(LayerKind, 8)))
    logits, tapped = [], []
    with ExitStack() as changed:
        for layer, part in zip(layers, experts, strict=True):
            changed.enter_context(replaced(layer, "experts", part))
            if ranks is not None:
                changed.enter_context(replaced(layer, "ranks", ranks))
        begin = 0
        for sizes in ((20, 20), (4, 3), (2, 1)):
            chunks = []
            for i, size in enumerate(sizes):
                tokens, pages = list(range(5 * size + i, 6 * size + i)), [4 * i, 4 * i + 1]
                wanted = size if rows is None else min(rows, size)
                chunks.append(SequenceChunk(tokens, begin, dict.fromkeys(LayerKind, pages), wanted))
            batch = build_batch(chunks, model.page_size, model.device)
            taps = Taps.empty((0, 1, 2, 3), sum(sizes), model.config.hidden, model.ops.dtype, model.device)
            taps.rows.fill_(torch.nan)
            logits.append(model.forward(batch, kv, taps).values)
            tapped.append(taps.rows)
            begin = begin or 20
    return torch.cat(logits), torch.cat(tapped), [part.left for part in experts]


@pytest.mark.parametrize("rows", [None, 1], ids=["all logits", "the last logits"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_left_sum_changes_no_bit(name: str, rows: int | None) -> None:
    model = load(name)
    logits, tapped, left = run(model, MOST, rows)
    want, want_tapped, none = run(model, 0, rows)
    assert none == [[], [], []]
    # Few of the 40 tokens reach the last layer where few logits are wanted: there they are a small batch. A tap behind
    # it has all of them run before.
    last = [7, 3] if rows is None else [2, 7, 2, 3, 2]
    assert left == [[7, 3], [7, 3], last]
    assert logits.isfinite().all()
    assert torch.equal(logits, want)
    assert torch.equal(tapped, want_tapped)


def test_ranks_that_sum_get_the_experts_sum() -> None:
    """With others there, one rank's sum goes to them first."""
    _, _, left = run(load("gpt-oss-20b"), MOST, None, NoSums(2))
    assert left == [[], [], []]


@pytest.mark.parametrize("card", ["h200", "gb10", "rtx3090"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_starts_no_launch_for_the_sum(name: str, card: str) -> None:
    """A step of one launch fewer a layer; and what adds up for taps is compiled for the step itself."""
    model = bind_shapes(PRESETS[name], Ops(known(card), Activations.BF16, Preference()))
    kv = model.new_cache(dict.fromkeys(LayerKind, 4))
    taps = Taps.empty((1,), 8, model.config.hidden, torch.bfloat16, torch.device("meta"))
    with recording() as found:
        model.forward(Step(8, 8, 1, 64).batch(), kv)
    assert not [kernel for kernel in found if kernel.short_name == "combine"]
    norms = [launch.constants["TOP_K"] for kernel, launch in found.items() if kernel.short_name == "rms_norm"]
    assert sorted(norms) == [0, 4 if name.startswith("gpt-oss") else 8]
    with recording() as tapped:
        model.forward(Step(8, 8, 1, 64).batch(), kv, taps)
    assert tapped.keys() == found.keys()
