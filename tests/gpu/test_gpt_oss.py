"""The whole model on a real GPU with the kernels that the oracle chooses, against the references on the same GPU."""

from __future__ import annotations

import pytest
import torch

from microscale.backends.ops import Wish
from microscale.engine.generate import Generation
from microscale.engine.load import LoadOptions, load_model
from microscale.engine.sampler import SamplingParams
from microscale.models.gpt_oss import GptOss

# Head size and hidden size of gpt-oss, few experts and layers: every fast kernel takes part.
SHAPE = {"num_hidden_layers": 4, "num_local_experts": 16, "vocab_size": 4096}
PROMPTS = [list(range(1, 301)), [5, 6, 7], list(range(1000, 1100))]


def load(wish: Wish) -> GptOss:
    return load_model(LoadOptions("gpt-oss-20b", load_format="dummy", device="cuda", wish=wish, overrides=SHAPE))


@pytest.mark.parametrize("budget", [4096, 64])
def test_fast_kernels_give_the_references_logprobs(budget: int) -> None:
    """Activations are bf16 in both. Tokens may part where two logits nearly tie; until then logprobs agree."""
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    fast = load(Wish())
    chosen = {d.op: d.chosen for d in fast.ops.plan.decisions.values()}
    assert chosen["moe"].startswith("triton")
    assert chosen["attention"].startswith("triton")
    assert chosen["small"].startswith("triton")
    ours = Generation(fast, PROMPTS, params, budget).run()
    truth = Generation(load(Wish("reference")), PROMPTS, params, budget).run()
    for a, b in zip(ours, truth, strict=True):
        pairs = zip(a.token_ids, b.token_ids, strict=True)
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(a.token_ids))
        assert same >= 1
        difference = torch.tensor(a.logprobs[:same]) - torch.tensor(b.logprobs[:same])
        # bf16 rounding of the residual stream, 4 layers: logits have a standard deviation of about 1.
        assert difference.abs().max() < 0.1
