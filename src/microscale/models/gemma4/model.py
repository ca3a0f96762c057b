"""Gemma 4 with experts (text): the same code runs on plain references and on the fast kernels.

A decoder layer is: norm, fused QKV, a norm of each head, rotary positions, paged attention, output projection, norm,
sum; then a dense MLP and, next to it, a mixture of experts, each between two norms, both together normed again, sum.
Every sixth layer sees everything, with wider heads whose keys and values come from one projection; the others see a
window.

Each sum is computed with the norms of all that read it, in one launch: the dense MLP, the experts and the router after
attention, the next layer after the experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from microscale.formats import BlockScaled, ChannelScaled
from microscale.models.batch import ForwardBatch
from microscale.models.config import LayerKind
from microscale.models.decoder import Decoder
from microscale.models.gemma4.config import Gemma4Config, PartialRope, short_name
from microscale.models.gemma4.weights import Gemma4Layer
from microscale.models.rope import computing_on
from microscale.models.storage import Weight
from microscale.models.weights import Weights
from microscale.planning.ops import (
    MLP_RUN,
    AttentionBatch,
    AttentionSpec,
    DenseWeights,
    Gate,
    GateKind,
    HeadNorms,
    Logits,
    NormAddNorm,
    Ops,
    PagedKv,
    RopeTable,
    Router,
    Routing,
    SideStream,
    SmallSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

GATE = Gate(GateKind.GELU_TANH, interleaved=False)
MLP_GATE = Gate(GateKind.GELU_TANH, interleaved=True, run=MLP_RUN)
"""The dense MLP's rows are brought into this order, in which one kernel serves it and the experts."""
SIDE_STREAM_TOKENS = 64
"""Up to which the dense MLP runs on a side stream (H200, one token: 1714 → 1570 us for 30 layers)."""


def partial_table(rope: PartialRope, head_dim: int, device: torch.device) -> RopeTable:
    """Plain frequencies for the first pairs, 0 for those that do not turn. The exponents run over the whole head."""
    pairs = head_dim // 2
    turning = int(rope.fraction * head_dim // 2)
    index = torch.arange(pairs, dtype=torch.float32, device=computing_on(device))
    frequencies = 1.0 / rope.theta ** (2 * index / head_dim)
    return RopeTable(frequencies.where(index < turning, 0.0).to(device), 1.0)


class Gemma4DecoderLayer:
    """One layer, bound to its kernels. ``closing.after`` is the norm of the next layer, which the model puts there."""

    def __init__(
        self,
        config: Gemma4Config,
        layer_idx: int,
        tensors: Gemma4Layer,
        ops: Ops,
        page_size: int,
        side_stream: SideStream,
    ) -> None:
        self.config = config
        self.ranks = ops.ranks
        self.side_stream = side_stream
        self.kind = kind = config.layer_kinds[layer_idx]
        self.heads = config.heads[kind]
        dtype, epsilon = ops.dtype, config.rms_epsilon
        self.attn_norm = tensors.attn_norm.to(dtype)
        self.head_norms = HeadNorms(tensors.q_norm.to(dtype), tensors.k_norm.to(dtype), epsilon)
        uses = {part: config.use(part, layer_idx) for part in ("qkv", "o", "gate_up", "down", "experts")}
        # Bound in the order in which they run: see ``models/outline.py``.
        self.qkv = ops.dense(uses["qkv"], DenseWeights(tensors.qkv))
        self.attention = ops.attention(kind.value, attention_spec(config, kind, ops, page_size), None)
        self.o = ops.dense(uses["o"], DenseWeights(tensors.o))
        self.small = ops.small(small_spec(config, kind, ops), f"small.{short_name(kind)}")
        self.gate_up = ops.dense(uses["gate_up"], DenseWeights(in_runs(tensors.gate_up)))
        self.down = ops.dense(uses["down"], DenseWeights(tensors.down))
        self.experts = ops.experts(uses["experts"], tensors.experts_gate_up, tensors.experts_down, config.top_k, GATE)
        self.experts.bind_mlp(self.gate_up, self.down)
        norms = ops.computed(lambda: norms_after_attention(tensors, dtype))
        self.middle = NormAddNorm(tensors.attn_out_norm.to(dtype), norms, epsilon)
        self.closing = NormAddNorm(
            tensors.mlp_out_norm.to(dtype),
            self.attn_norm[None],
            epsilon,
            tensors.scalar,
            tensors.experts_out_norm.to(dtype),
            tensors.both_norm.to(dtype),
        )
        self.router = Router(tensors.router.to(dtype), expert_scale=tensors.expert_scale.float())
        self.uses = uses | {"attention": kind.value}
        """What plans call the bound parts."""

    def forward(
        self, x: Tensor, state: Tensor, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """``state``: the norm of ``x`` that the layer reads."""
        qkv = self._project(state)
        queries = batch.attention[self.kind]
        if self.attention.why_not_fused_heads(qkv, self.head_norms, kv, queries) is None:
            return self._close(self.attention.from_heads(qkv, rope, self.head_norms, kv, queries), x)
        return self.attend(self._write(qkv, batch, kv, rope), x, kv, queries)

    def queries(
        self, x: Tensor, state: Tensor, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        return self._write(self._project(state), batch, kv, rope), x

    def attend(self, q: Tensor, x: Tensor, kv: PagedKv, queries: AttentionBatch) -> tuple[Tensor, Tensor]:
        if not x.shape[0]:
            return x, x
        return self._close(self.attention(q, kv, queries), x)

    def _project(self, normed: Tensor) -> Tensor:
        return self.qkv(normed).view(normed.shape[0], -1, self.heads.head_dim)

    def _write(self, qkv: Tensor, batch: ForwardBatch, kv: PagedKv, rope: RopeTable) -> Tensor:
        heads, slots = self.heads.num_heads, batch.slots[self.kind]
        return self.small.rope_and_write_kv(qkv, heads, batch.positions, rope, kv, slots, self.head_norms)

    def _close(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        # Softmax over all experts, renormalised over the chosen: the same as a softmax over those.
        normed, x, routing = self.small.norm_add_norm_route(
            self.ranks.sum(self.o(attended.flatten(1))), x, self.middle, self.router, self.config.top_k
        )
        dense, experts = self.summed(*self.feed_forward(normed, routing))
        (normed,), x = self.small.norm_add_norm(dense, experts, x, self.closing)
        return x, normed

    def summed(self, dense: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """What MLP and experts give on all ranks together, in one reduction."""
        if self.ranks.world == 1:
            return dense, experts
        dense, experts = self.ranks.sum(torch.stack((dense, experts)))
        return dense, experts

    def feed_forward(self, normed: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """``normed [2, tokens, hidden]``, for the MLP and for the experts → what each gives.

        Each alone leaves the memory idle for half of its time when tokens are few.
        """
        if self.experts.why_not_mlp(normed.shape[1]) is None:
            both = self.experts.with_mlp(normed, routing)
            return both[0], both[1]
        for_mlp, for_experts = normed
        return self.side_stream(
            lambda: self.down(self.small.gated(self.gate_up(for_mlp), MLP_GATE)),
            lambda: self.experts(for_experts, routing),
            at_once=normed.shape[1] <= SIDE_STREAM_TOKENS,
        )


def norms_after_attention(tensors: Gemma4Layer, dtype: torch.dtype) -> Tensor:
    """The norms that the dense MLP, the experts and the router read, as rows of one tensor."""
    # The router reads the plain norm times its scale over the root of the width: a norm with a weight.
    router_norm = tensors.router_scale.to(torch.float32, copy=True)
    router_norm.mul_(router_norm.shape[0] ** -0.5)
    readers = (tensors.mlp_norm, tensors.experts_norm, router_norm)
    norms = router_norm.new_empty((len(readers), router_norm.shape[0]), dtype=dtype)
    for place, norm in enumerate(readers):
        norms[place] = norm
    return norms


def in_runs(gate_up: Weight) -> Weight:
    """All gate rows, then all up rows → ``MLP_RUN`` of the ones, as many of the others, and so on."""
    if isinstance(gate_up, BlockScaled | ChannelScaled):
        return gate_up.map(in_runs_of)
    return in_runs_of(gate_up)


def in_runs_of(rows: Tensor) -> Tensor:
    return rows.view(2, -1, MLP_RUN, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def attention_spec(config: Gemma4Config, kind: LayerKind, ops: Ops, page_size: int) -> AttentionSpec:
    heads = config.heads[kind]
    return AttentionSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        window=config.sliding_window if kind is LayerKind.SLIDING else None,
        sinks=False,
        page_size=page_size,
        activations=ops.activations,
        tokens=1,
        context=config.max_context,
        scale=1.0,
    )


def small_spec(config: Gemma4Config, kind: LayerKind, ops: Ops) -> SmallSpec:
    heads = config.heads[kind]
    return SmallSpec(
        hidden=config.hidden,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        num_experts=config.num_experts,
        top_k=config.top_k,
        activations=ops.activations,
        tokens=1,
    )


class Gemma4(Decoder["Tensor"]):
    """The whole model."""

    config: Gemma4Config
    layers: Sequence[Gemma4DecoderLayer]

    def __init__(
        self,
        weights: Weights[Gemma4Config, Gemma4Layer],
        ops: Ops,
        device: torch.device,
        page_size: int = 16,
        on_layer: Callable[[], None] = lambda: None,
    ) -> None:
        config = weights.config
        # As wide as the activations, as the model was trained: 53 for a root of 53.07 in bf16.
        self.embed_scale = ops.computed(lambda: float(torch.tensor(config.hidden**0.5, dtype=ops.dtype)))
        self.side_stream = SideStream(device)
        self.softcap = config.softcap
        super().__init__(weights, ops, device, page_size, on_layer)

    def bind_layer(self, layer_idx: int, tensors: Gemma4Layer) -> Gemma4DecoderLayer:
        return Gemma4DecoderLayer(self.config, layer_idx, tensors, self.ops, self.page_size, self.side_stream)

    def bind_norm(self, weight: Tensor) -> None:
        norms = [*(layer.attn_norm for layer in self.layers[1:]), weight.to(self.ops.dtype)]
        for layer, norm in zip(self.layers, norms, strict=True):
            layer.closing = replace(layer.closing, after=norm[None])

    def rope_tables(self) -> dict[LayerKind, RopeTable]:
        """The kinds' heads and ropes differ."""
        rope, heads = self.config.rope, self.config.heads
        return {kind: partial_table(rope[kind], heads[kind].head_dim, self.device) for kind in self.config.layer_kinds}

    def head_shapes(self) -> dict[LayerKind, tuple[int, int]]:
        return {kind: (heads.num_kv_heads, heads.head_dim) for kind, heads in self.config.heads.items()}

    def begin(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(token_ids).mul_(self.embed_scale)
        first = self.layers[0]
        return x, first.small.rms_norm(x, first.attn_norm, self.config.rms_epsilon)

    def stream(self, x: Tensor, state: Tensor, out: Tensor) -> None:
        out.copy_(x)

    def end(self, x: Tensor, state: Tensor) -> Logits:
        return self.lm_head.logits(state)
