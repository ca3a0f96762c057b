"""A decoder layer of a draft head, bound to its kernels: attention over paged KV and a dense MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

from microscale.backends.ops import (
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
from microscale.models.batch import ForwardBatch
from microscale.models.draft_heads.config import LayerShape
from microscale.models.draft_heads.rows import FULL
from microscale.models.draft_heads.tensors import LayerTensors

if TYPE_CHECKING:
    from torch import Tensor

GATE = Gate(GateKind.SILU, interleaved=False)


class HeadLayer:
    """One layer. What it reads is the head's to say: it gets that normed."""

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
        if self.attention.refuses_heads(qkv, self.head_norms, kv, queries) is None:
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
