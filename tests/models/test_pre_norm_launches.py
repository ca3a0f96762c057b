"""What a decoding step of gpt-oss and Qwen3-MoE launches, in order, on tensors without memory."""

from __future__ import annotations

import pytest

from microscale.backends.ops import Activations, Ops, Preference
from microscale.backends.peer_ranks import shape_ranks
from microscale.backends.ranks import ALONE, Absent, Ranks
from microscale.hardware import known
from microscale.kernels.launch import Launch, taken_by
from microscale.models.config import LayerKind
from microscale.models.families import PRESETS
from microscale.models.recorded import Step, bind_shapes
from microscale.parallel.sharding import Shard

NORM, QKV, BOTH = "rms_norm", "small_batch", "small_batch_from_sum"


def launches(name: str, tokens: int, card: str = "h200", ranks: Ranks = ALONE) -> list[str]:
    """Of the shortened model: two layers."""
    config = PRESETS[name].sharded(Shard(0, ranks.world))
    model = bind_shapes(config, Ops(known(card), Activations.BF16, Preference(), ranks=ranks))
    cache = model.new_cache(dict.fromkeys(LayerKind, 4))
    found: list[str] = []

    def take(started: Launch) -> bool:
        found.append(started.fn.__name__)
        return False

    with taken_by(take):
        model.forward(Step(tokens, tokens, 1, 128).batch(), cache)
    return found


@pytest.mark.parametrize("name", ["gpt-oss-20b", "gpt-oss-120b", "qwen3-30b-a3b"])
def test_one_token_is_normed_in_the_launch_of_its_projection(name: str) -> None:
    rest = ["attend_fused", QKV, "add_norm_route", "gate_up_small", "down_direct"]
    found = [kernel for kernel in launches(name, 1) if kernel != "merge_splits"]
    assert found == [NORM, QKV, *rest, BOTH, *rest, NORM, "small_batch_logits"]


@pytest.mark.parametrize(("tokens", "card"), [(2, "h200"), (1, "a100")])
def test_others_have_a_launch_for_the_norm(tokens: int, card: str) -> None:
    found = launches("gpt-oss-20b", tokens, card)
    assert BOTH not in found
    assert found.count(NORM) == 3


def test_a_sum_over_ranks_keeps_its_own_norm() -> None:
    """It is one launch with the sum; where a library sums, the projection norms."""
    assert BOTH not in launches("gpt-oss-20b", 1, ranks=shape_ranks(2))
    assert launches("gpt-oss-20b", 1, ranks=Absent(2)).count(BOTH) == 1
