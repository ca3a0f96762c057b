"""The layers that vLLM's ranks have, on a real GPU and in a graph, against the reference. Needs no vLLM.

``pytest tests/vllm/test_shards_on_gpu.py``
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from microscale.formats import BlockScaled
from microscale.hardware import detect
from microscale.kernels.moe.reference import moe
from microscale.kernels.moe.spec import Activations, MoeWeights, Routing
from microscale.planning.ops import Ops, Preference
from microscale_lab.cases.errors import check_rounded
from microscale_lab.cases.experts import GELU, ExpertsInput, make_routing, make_tokens, make_weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# gpt-oss on 2, 4 and 8 ranks; the last rank of 8 has 192 of 384, of 4 has 672 of 736. Gemma 4 on 2.
SHARDS = {
    "1440": (ExpertsInput("1440", 1, 8, 4, 2880, 1440), "mxfp4", 1440),
    "736": (ExpertsInput("736", 1, 8, 4, 2880, 736), "mxfp4", 736),
    "672 of 736": (ExpertsInput("672 of 736", 1, 8, 4, 2880, 736), "mxfp4", 672),
    "192 of 384": (ExpertsInput("192 of 384", 1, 8, 4, 2880, 384), "mxfp4", 192),
    "Gemma 4, 352": (ExpertsInput("Gemma 4, 352", 1, 16, 8, 2816, 352, GELU, bias=False), "mxfp8", 352),
}


def fill_up(weights: MoeWeights, filled: int) -> None:
    """Zeros in every place that vLLM's loader leaves alone: units from ``filled`` on."""
    for tensor in (weights.gate_up.values, weights.gate_up.scales, weights.gate_up_bias):
        if tensor is not None:
            tensor[:, 2 * filled :] = 0
    for tensor in (weights.down.values, weights.down.scales):
        whole = weights.down.shape[-1]
        tensor[..., tensor.shape[-1] * filled // whole :] = 0


def with_spare(weights: MoeWeights, spare: int) -> MoeWeights:
    """``spare`` experts of zeros after the real ones, as with expert parallelism."""

    def longer(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.cat((tensor, tensor.new_zeros(spare, *tensor.shape[1:])))

    def longer_matrix(matrix: BlockScaled) -> BlockScaled:
        values, scales = longer(matrix.values), longer(matrix.scales)
        assert values is not None
        assert scales is not None
        return BlockScaled(values, scales, matrix.format)

    gate_up, down = longer_matrix(weights.gate_up), longer_matrix(weights.down)
    return MoeWeights(gate_up, down, longer(weights.gate_up_bias), longer(weights.down_bias))


def check_in_a_graph(weights: MoeWeights, case: ExpertsInput, x: Tensor, routing: Routing) -> None:
    """Captured with other tokens and all rows on the first experts, as vLLM captures; replayed with these."""
    op = Ops(detect(), Activations.BF16, Preference()).moe(weights, case.top_k, case.gate)
    held = torch.zeros_like(x)
    ids = torch.arange(case.top_k, dtype=torch.int32, device="cuda").repeat(case.tokens, 1)
    live = Routing(ids, torch.zeros_like(routing.weights))
    op(held, live)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = op(held, live)
    held.copy_(x)
    live.expert_ids.copy_(routing.expert_ids)
    live.weights.copy_(routing.weights)
    graph.replay()
    check_rounded(y, moe(x, weights, routing, case.gate), "bf16", 3)


@pytest.mark.parametrize("tokens", [1, 8, 64, 256])
@pytest.mark.parametrize("name", SHARDS)
def test_shards(name: str, tokens: int) -> None:
    shape, fmt, filled = SHARDS[name]
    case = replace(shape, tokens=tokens)
    weights = make_weights(case, fmt, "cuda")
    if filled < case.intermediate:
        fill_up(weights, filled)
    check_in_a_graph(weights, case, make_tokens(case, "cuda"), make_routing(case, "cuda"))


@pytest.mark.parametrize("tokens", [2, 8, 64, 256])
def test_experts_of_other_ranks(tokens: int) -> None:
    """Half of the experts are elsewhere: their slots go to spare experts with weight 0."""
    case = ExpertsInput("apart", tokens, 16, 4, 2880, 2880)
    routing = make_routing(case, "cuda")
    here = case.num_experts // 2
    weights = with_spare(make_weights(replace(case, num_experts=here), "mxfp4", "cuda"), case.top_k)
    elsewhere = routing.expert_ids >= here
    spare = here + torch.arange(case.top_k, dtype=torch.int32, device="cuda")
    local = Routing(torch.where(elsewhere, spare, routing.expert_ids), routing.weights.masked_fill(elsewhere, 0.0))
    check_in_a_graph(weights, case, make_tokens(case, "cuda"), local)
