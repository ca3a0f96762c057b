"""What a decoding step of gpt-oss and Qwen3-MoE launches, in order, on tensors without memory."""

from __future__ import annotations

import pytest

from microscale.hardware import known
from microscale.kernels.launch import Launch, taken_by
from microscale.models.config import LayerKind
from microscale.models.families import PRESETS, AnyModel
from microscale.models.pre_norm import PreNormModel
from microscale.models.recorded import Step, bind_shapes
from microscale.parallel.sharding import Shard
from microscale.planning.ops import Activations, Ops, Preference
from microscale.planning.ranks import ALONE, NoSums, RankSums

MODELS = ["gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b"]
NORM, QKV, BOTH = "rms_norm", "small_batch", "small_batch_from_sum"


def shapes_of(name: str, card: str, ranks: RankSums = ALONE) -> AnyModel:
    """The shortened model: two layers."""
    config = PRESETS[name].sharded(Shard(0, ranks.world))
    return bind_shapes(config, Ops(known(card), Activations.BF16, Preference(), ranks=ranks))


def launches(name: str, tokens: int, card: str = "h200", ranks: RankSums = ALONE) -> list[str]:
    model = shapes_of(name, card, ranks)
    cache = model.new_cache(dict.fromkeys(LayerKind, 4))
    found: list[str] = []

    def take(started: Launch) -> bool:
        found.append(started.fn.__name__)
        return False

    with taken_by(take):
        model.forward(Step(tokens, tokens, 1, 128).batch(), cache)
    return found


LM_HEAD = "small_batch_logits"


@pytest.mark.parametrize("name", MODELS)
def test_one_token_is_normed_in_the_launch_of_its_projection(name: str) -> None:
    rest = ["attend_fused", QKV, "add_norm_route", "gate_up_small", "down_direct"]
    found = [kernel for kernel in launches(name, 1) if kernel != "merge_splits"]
    assert found == [NORM, QKV, *rest, BOTH, *rest, NORM, LM_HEAD]


@pytest.mark.parametrize(("tokens", "card"), [(2, "h200"), (1, "a100")])
def test_others_have_a_launch_for_the_norm(tokens: int, card: str) -> None:
    found = launches("gpt-oss-20b", tokens, card)
    assert BOTH not in found
    assert found.count(NORM) == 3


def test_few_tokens_leave_the_sum_of_their_experts_to_the_norm() -> None:
    found = launches("gpt-oss-20b", 4)
    assert found.count(NORM) == 3
    assert "combine" not in found
    assert BOTH not in found


@pytest.mark.parametrize("card", ["a100", "h200", "b200", "gb10"])
@pytest.mark.parametrize("name", MODELS)
def test_a_projection_that_norms_has_a_sum_to_read(name: str, card: str) -> None:
    """It takes a token whose experts are added up: no batch is both left in parts and normed by QKV."""
    model = shapes_of(name, card)
    assert isinstance(model, PreNormModel)
    layer = model.layers[1]
    norms = {tokens for tokens in range(1, 129) if layer.qkv.why_not_fused_norm(tokens) is None}
    parts = {tokens for tokens in range(1, 129) if layer.experts.why_not_parts(tokens) is None}
    assert norms == (set() if card == "a100" else {1})
    assert parts >= {3, 4, 8}
    assert not norms & parts


def test_a_projection_norms_a_sum_over_ranks() -> None:
    assert launches("gpt-oss-20b", 1, ranks=NoSums(2)).count(BOTH) == 1
