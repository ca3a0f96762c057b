"""Expert layers to run kernels on: weights, tokens and routing of one layer, and what an answer is held against.

Widths are narrow cousins of real ones with the same tails: 96 and 160 leave half a tile of 64 as 2912 would, 352 ends
like 704 and 2112 (whole tiles of 64, half a tile of 128), 320 like 2880 (an odd number of tiles of 64).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from microscale.formats import BlockScaled, block_format, encode
from microscale.kernels.moe.packed import PackedExperts, pack_experts
from microscale.kernels.moe.reference import moe
from microscale.kernels.moe.spec import Gate, GateKind, MoeWeights, Routing
from microscale.kernels.narrow import Rounding, mxfp8

if TYPE_CHECKING:
    from torch import Tensor

SWIGLU = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
SWIGLU_HALVES = Gate(GateKind.SWIGLU_CLAMPED, interleaved=False)
GELU = Gate(GateKind.GELU_TANH, interleaved=False)
SILU = Gate(GateKind.SILU, interleaved=False)


@dataclass(frozen=True)
class ExpertsInput:
    """One expert layer and its tokens."""

    name: str
    tokens: int
    num_experts: int = 4
    top_k: int = 2
    hidden: int = 128
    intermediate: int = 128
    gate: Gate = SWIGLU
    bias: bool = True
    spread: str = "even"
    """``even``, ``one`` (all tokens on the same experts) or ``unused`` (some experts get no token)."""
    size: float = 1.0
    """Of the tokens' numbers. 6: about a quarter of the gate's inputs are beyond its clamp."""


LAYERS = [
    ExpertsInput("one token, beyond the clamp", 1, size=6.0),
    ExpertsInput("two tokens, no bias", 2, bias=False, size=6.0),
    ExpertsInput("two tokens, three experts each", 2, top_k=3),
    ExpertsInput("odd number of tokens", 37, num_experts=5, top_k=3),
    ExpertsInput("all tokens on one expert", 35, top_k=1, spread="one"),
    ExpertsInput("unused experts", 6, num_experts=16, spread="unused"),
    ExpertsInput("hidden 96", 5, hidden=96, size=6.0),
    ExpertsInput("hidden 160, intermediate 96, halves", 5, hidden=160, intermediate=96, gate=SWIGLU_HALVES),
    ExpertsInput("hidden 352, intermediate 160", 2, num_experts=2, hidden=352, intermediate=160, gate=GELU, bias=False),
    ExpertsInput("hidden 320, intermediate 352", 2, num_experts=2, hidden=320, intermediate=352),
    ExpertsInput("gelu with bias", 20, gate=GELU),
    ExpertsInput("silu", 5, hidden=96, gate=SILU, bias=False),
]


def encoded(x: Tensor, fmt: str) -> BlockScaled:
    """``x`` in a block format. Of NVFP4, an eighth of the blocks are under any scale, 0 and subnormal ones among them,
    and each row under another float32 scale, so that one in the wrong place shows."""
    tensor = encode(x, block_format(fmt))
    if tensor.format.scale_bytes == 4:  # as published
        return replace(tensor, scales=tensor.scales.bfloat16().float())
    if tensor.row_scales is None:
        return tensor
    generator = torch.Generator().manual_seed(x.numel())
    some = (torch.rand(tensor.scales.shape, generator=generator) < 0.125).to(x.device)
    scales = torch.randint(0, 0x7F, tensor.scales.shape, generator=generator, dtype=torch.uint8).to(x.device)
    rows = 0.5 + torch.rand(tensor.row_scales.shape, generator=generator).to(x.device)
    return replace(tensor, scales=torch.where(some, scales, tensor.scales), row_scales=tensor.row_scales * rows)


def make_weights(layer: ExpertsInput, fmt: str, device: str) -> MoeWeights:
    generator = torch.Generator(device).manual_seed(len(layer.name))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    experts, hidden, units = layer.num_experts, layer.hidden, layer.intermediate
    return MoeWeights(
        encoded(normal(experts, 2 * units, hidden) * hidden**-0.5, fmt),
        encoded(normal(experts, hidden, units) * units**-0.5, fmt),
        (normal(experts, 2 * units) * 0.5).bfloat16() if layer.bias else None,
        (normal(experts, hidden) * 0.5).bfloat16() if layer.bias else None,
    )


def make_routing(layer: ExpertsInput, device: str) -> Routing:
    generator = torch.Generator().manual_seed(layer.tokens)
    logits = torch.randn(layer.tokens, layer.num_experts, generator=generator)
    if layer.spread == "one":
        logits = logits[:1].expand_as(logits)
    elif layer.spread == "unused":
        logits[:, ::3] -= 100
    values, ids = logits.topk(layer.top_k, dim=-1)
    return Routing(ids.int().contiguous().to(device), values.softmax(-1).contiguous().to(device))


def make_tokens(layer: ExpertsInput, device: str) -> Tensor:
    """bf16 rows inside a wider buffer whose margins are NaN: reading past a row shows in the result."""
    generator = torch.Generator().manual_seed(layer.tokens + 1)
    wide = torch.full((layer.tokens + 2, layer.hidden + 64), float("nan"), dtype=torch.bfloat16)
    wide[1:-1, : layer.hidden] = layer.size * torch.randn(layer.tokens, layer.hidden, generator=generator)
    return wide.to(device)[1:-1, : layer.hidden]


def e4m3_by_token(x: Tensor) -> Tensor:
    """E4M3 under one power of two a token, so that the largest number lies between 128 and 256."""
    x = x.float()
    scale = torch.exp2(7.0 - x.abs().amax(-1, keepdim=True).clamp(min=2.0**-119).log2().floor())
    return (x * scale).to(torch.float8_e4m3fn).float() / scale


@dataclass(frozen=True)
class ExpertsProblem:
    layer: ExpertsInput
    weights: MoeWeights
    packed: PackedExperts
    routing: Routing
    x: Tensor

    @classmethod
    def of(cls, layer: ExpertsInput, fmt: str, device: str) -> ExpertsProblem:
        weights = make_weights(layer, fmt, device)
        return cls(
            layer, weights, pack_experts(weights, layer.gate), make_routing(layer, device), make_tokens(layer, device)
        )

    def expected(self) -> Tensor:
        """The float32 reference."""
        return moe(self.x, self.weights, self.routing, self.layer.gate)

    def expected_quantised(self, round_x: Rounding = mxfp8, round_h: Rounding = mxfp8) -> Tensor:
        """Float32, with both GEMMs' inputs rounded as the kernels do."""
        return moe(self.x, self.weights, self.routing, self.layer.gate, round_x, round_h)
