"""``dense`` as plain float32 arithmetic on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.formats import decode
from microscale.hardware import Gpu
from microscale.kernels.dense.cost import activation_bytes, dense_flops, weight_bytes
from microscale.kernels.dense.spec import FORMATS, DenseOp, DensePath, DenseSpec, DenseWeights, Logits, LogitsPath
from microscale.kernels.op import Cost, Reason, always

if TYPE_CHECKING:
    from torch import Tensor

# Rows decoded at a time: a float32 copy of gpt-oss's lm_head would take 2.3 GB.
CHUNK_ROWS = 16384
BLOCK_ROWS = 1024


def dense(x: Tensor, weights: DenseWeights, residual: Tensor | None = None) -> Tensor:
    """``x [tokens, columns]`` → ``[tokens, rows]`` in float32."""
    x = x.float()
    rows = weights.weight.shape[0]
    parts = []
    for start in range(0, rows, CHUNK_ROWS):
        chunk = weights.weight[start : start + CHUNK_ROWS]
        parts.append(x @ (chunk.float() if isinstance(chunk, torch.Tensor) else decode(chunk)).T)
    y = torch.cat(parts, dim=-1)
    if weights.bias is not None:
        y = y + weights.bias.float()
    return y if residual is None else y + residual.float()


def capped(values: Tensor, softcap: float | None) -> Tensor:
    """Logits squeezed into ±softcap."""
    return values if softcap is None else torch.tanh(values / softcap) * softcap


def summarise(values: Tensor, block_rows: int = BLOCK_ROWS) -> Logits:
    """What the logits epilogue says of its logits, from float32 ``values [tokens, rows]``."""
    tokens, rows = values.shape
    blocks = -(-rows // block_rows)
    padded = values.new_full((tokens, blocks * block_rows), -torch.inf)
    padded[:, :rows] = values
    padded = padded.view(tokens, blocks, block_rows)
    largest = padded.amax(dim=-1)
    at_largest = (padded == largest[..., None]) | padded.isnan()
    place = at_largest.int().argmax(dim=-1).int()  # the first of equals
    first = torch.arange(blocks, device=values.device, dtype=torch.int32) * block_rows
    return Logits(values, largest, place + first, (padded - largest[..., None]).exp().sum(dim=-1), block_rows)


def _run(packed: DenseWeights, spec: DenseSpec, gpu: Gpu, x: Tensor, residual: Tensor | None) -> Tensor:
    return dense(x, packed, residual).to(x.dtype)


def run_logits(packed: DenseWeights, spec: DenseSpec, gpu: Gpu, x: Tensor) -> Logits:
    """Float32 logits, capped, with their blocks."""
    return summarise(capped(dense(x, packed), spec.softcap))


class ReferenceDense(DenseOp[DenseWeights]):
    """Float32, decoded on every call in chunks of rows."""

    name = "reference"
    paths = (DensePath("float32", "it is the only one", always, _run),)
    logits_paths = (LogitsPath("float32", "it is the only one", always, run_logits),)
    layout = "checkpoint"
    uncapturable = None

    def supports(self, spec: DenseSpec, gpu: Gpu) -> Reason | None:
        if spec.weight_format not in FORMATS:
            return f"reads {', '.join(FORMATS)} weights, not {spec.weight_format}"
        if spec.activations.narrow:
            return f"computes in float32, not with {spec.activations} activations"
        return None

    def cost(self, spec: DenseSpec, gpu: Gpu) -> Cost:
        return Cost(weight_bytes(spec) + activation_bytes(spec), dense_flops(spec), efficiency=0.02)

    def packed_bytes(self, spec: DenseSpec) -> int:
        return weight_bytes(spec)

    def pack(self, weights: DenseWeights, spec: DenseSpec) -> DenseWeights:
        return weights
