"""A decoder layer of a draft head, bound to its kernels: attention over paged KV and a dense MLP. And where the rows of
a head lie: positions, slots and lengths, which torch computes between kernels.

Kernels are listed on tensors without memory (``meta``). There the functions for rows make the shape of their result and
compute nothing: for the first sum, product, ``arange`` or ``cat`` of such tensors torch imports its compiler, 900
modules, at every start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.config import LayerKind
from microscale.models.draft_heads.config import HeadConfig, LayerShape
from microscale.models.draft_heads.weights import LayerTensors
from microscale.planning.ops import (
    AttentionBatch,
    AttentionSpec,
    DenseWeights,
    Gate,
    GateKind,
    HeadNorms,
    Ops,
    PagedKv,
    RopeTable,
    SmallSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

FULL = LayerKind.FULL
GATE = Gate(GateKind.SILU, interleaved=False)


class HeadLayer:
    """One layer. The head norms what the layer reads."""

    kind = FULL

    def __init__(self, shape: LayerShape, tensors: LayerTensors, ops: Ops, page_size: int) -> None:
        self.shape = shape
        dtype, self.epsilon = ops.dtype, shape.rms_epsilon
        self.input_norm, self.mlp_norm = tensors.input_norm.to(dtype), tensors.mlp_norm.to(dtype)
        self.head_norms: HeadNorms | None = None
        if tensors.q_norm is not None and tensors.k_norm is not None:
            self.head_norms = HeadNorms(tensors.q_norm.to(dtype), tensors.k_norm.to(dtype), self.epsilon, values=False)
        # Bound in the order in which they run: see ``models/outline.py``.
        self.qkv = ops.dense("qkv", DenseWeights(tensors.qkv, tensors.qkv_bias))
        self.attention = ops.attention(FULL.value, attention_spec(shape, ops, page_size), None)
        self.o = ops.dense("o", DenseWeights(tensors.o, tensors.o_bias))
        self.small = ops.small(small_spec(shape, ops))
        self.gate_up = ops.dense("mlp.gate_up", DenseWeights(tensors.gate_up))
        self.down = ops.dense("mlp.down", DenseWeights(tensors.down))

    def forward(
        self, normed: Tensor, x: Tensor, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """The residual stream ``x`` after attention, and what the MLP adds to it."""
        qkv = self._project(normed)
        queries = batch.attention[FULL]
        if self.attention.why_not_fused_heads(qkv, self.head_norms, kv, queries) is None:
            attended = self.attention.from_heads(qkv, rope, self.head_norms, kv, queries)
            return self._feed_forward(attended, x)
        return self.attend(self._write(qkv, batch.positions, batch.slots[FULL], kv, rope), x, kv, queries)

    def queries(self, normed: Tensor, positions: Tensor, slots: Tensor, kv: PagedKv, rope: RopeTable) -> Tensor:
        """The layer up to its queries. Keys and values are in the cache."""
        return self._write(self._project(normed), positions, slots, kv, rope)

    def attend(self, q: Tensor, x: Tensor, kv: PagedKv, queries: AttentionBatch) -> tuple[Tensor, Tensor]:
        """The rest of the layer, for any of the rows."""
        if not x.shape[0]:
            return x, x
        return self._feed_forward(self.attention(q, kv, queries), x)

    def _project(self, normed: Tensor) -> Tensor:
        return self.qkv(normed).view(normed.shape[0], -1, self.shape.head_dim)

    def _write(self, qkv: Tensor, positions: Tensor, slots: Tensor, kv: PagedKv, rope: RopeTable) -> Tensor:
        return self.small.rope_and_write_kv(qkv, self.shape.num_heads, positions, rope, kv, slots, self.head_norms)

    def _feed_forward(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        normed, x = self.small.add_rms_norm(self.o(attended.flatten(1)), x, self.mlp_norm, self.epsilon)
        return x, self.down(self.small.gated(self.gate_up(normed), GATE))


def attention_spec(shape: LayerShape, ops: Ops, page_size: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        window=None,
        sinks=False,
        page_size=page_size,
        activations=ops.activations,
        tokens=1,
        context=shape.max_context,
    )


def small_spec(shape: LayerShape, ops: Ops) -> SmallSpec:
    """Without experts."""
    return SmallSpec(
        hidden=shape.hidden,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_experts=0,
        top_k=0,
        activations=ops.activations,
        tokens=1,
    )


def new_cache(config: HeadConfig, ops: Ops, num_pages: int, page_size: int, device: torch.device) -> KvCache:
    """Pages of the head's own."""
    shape = (config.layer.num_kv_heads, config.layer.head_dim)
    kinds = [FULL] * config.num_layers
    return KvCache.allocate(kinds, {FULL: num_pages}, page_size, {FULL: shape}, ops.kv_dtype, device)


# ---- rows ------------------------------------------------------------------------------------------------------------


def count_up(size: int, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """0, 1 … ``size - 1``; int64 without ``dtype``."""
    dtype = dtype or torch.int64
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device)
    return torch.arange(size, dtype=dtype, device=device)


def join(first: Tensor, second: Tensor, dim: int = 0) -> Tensor:
    """Matrices or vectors of one type, one behind the other."""
    if first.is_meta:
        shape = list(first.shape)
        shape[dim] += second.shape[dim]
        return first.new_empty(shape)
    return torch.cat((first, second), dim)


def following(last: AttentionBatch, count: int) -> Tensor:
    """Positions ``[sequences, count]`` int64 of the tokens after the last rows."""
    lens = last.context_lens
    if lens.is_meta:
        return lens.new_empty((lens.shape[0], count), dtype=torch.int64)
    return lens.to(torch.int64)[:, None] + torch.arange(count, device=lens.device)


def slots_of(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Where positions ``[sequences, n]`` of the table's sequences are."""
    if positions.is_meta:
        return positions.new_empty(positions.shape)
    pages = page_table.to(torch.int64).gather(1, positions // page_size)
    return pages * page_size + positions % page_size


class Steps:
    """The decoding steps of a head that goes on by itself: one row of each sequence, then the next, and so on.

    All of them are laid out at once: a step has nothing to compute but the head itself.
    """

    def __init__(self, last: AttentionBatch, count: int, page_size: int) -> None:
        positions = following(last, count)
        sequences, device = positions.shape[0], positions.device
        self._table = last.page_table
        self._positions = positions.T.contiguous()  # [count, sequences]
        self._slots = slots_of(last.page_table, positions, page_size).T.contiguous()
        # A step's lengths begin at a multiple of 16 bytes: attention is compiled for that.
        lens = torch.empty((count, -(-sequences // 4) * 4), dtype=torch.int32, device=device)
        self._lens = lens[:, :sequences].copy_(self._positions).add_(1)
        self._starts = count_up(sequences + 1, device, torch.int32)

    def batch(self, step: int, token_ids: Tensor) -> ForwardBatch:
        """Step 0 is the row after the last one."""
        queries = AttentionBatch(self._starts, self._lens[step], self._table, 1)
        return ForwardBatch(token_ids, self._positions[step], {FULL: queries}, {FULL: self._slots[step]}, None)
