"""The expert layer of one rank, where several share a model (vLLM's tensor and expert parallelism), and its kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from microscale.formats import BLOCK, MXFP4, block_format, without_memory
from microscale.hardware import Gpu
from microscale.planning.ops import Kernel, Launch, MoeSpec, MoeWeights, Ops, Preference, Routing, recording

if TYPE_CHECKING:
    from torch import Tensor

TENSOR_RANKS = (1, 2, 4, 8)
EXPERT_RANKS = (2, 4, 8)


def padded_width(width: int) -> int:
    """A rank's share of the intermediate size in whole blocks: the last rank's further rows are zeros."""
    return width + -width % BLOCK


def shards(spec: MoeSpec) -> Iterator[MoeSpec]:
    """What one rank of vLLM may be asked for of this layer: a share of its width, or some experts and spare ones."""
    for ranks in TENSOR_RANKS:
        width = spec.intermediate // ranks
        if width % BLOCK == 0 or spec.weight_format == MXFP4.name:  # the other loader cannot cut a block
            yield replace(spec, intermediate=padded_width(width))
    for ranks in EXPERT_RANKS:
        yield replace(spec, num_experts=spec.num_experts // ranks + spec.top_k)


def shape_only(spec: MoeSpec) -> MoeWeights:
    """The layer's weights without any numbers."""
    fmt, experts = block_format(spec.weight_format), spec.num_experts

    def bias(rows: int) -> Tensor | None:
        return torch.empty((experts, rows), dtype=torch.bfloat16, device="meta") if spec.bias else None

    rows = 2 * spec.intermediate
    gate_up = without_memory((experts, rows, spec.hidden), fmt)
    down = without_memory((experts, spec.hidden, spec.intermediate), fmt)
    return MoeWeights(gate_up, down, bias(rows), bias(spec.hidden))


def record_moe(spec: MoeSpec, gpu: Gpu, tokens: Iterable[int]) -> dict[Kernel, Launch]:
    """Every kernel that the layer, as the oracle decides it, starts for these numbers of tokens."""
    moe = Ops(gpu, spec.activations, Preference()).moe(shape_only(spec), spec.top_k, spec.gate)
    with recording() as found:
        for count in tokens:
            ids = torch.empty((count, spec.top_k), dtype=torch.int32, device="meta")
            x = torch.empty((count, spec.hidden), dtype=torch.bfloat16, device="meta")
            moe(x, Routing(ids, ids.float()))
    return found
