"""Qwen3.5-MoE and Qwen3.6: the same code runs on plain references and on the fast kernels.

Three of four layers carry a state (Gated DeltaNet, ``kernels/recurrent``): norm, projections, state, output projection.
The others have attention: norm, fused QKV with a gate for each query, a norm of each head, rotary positions on a part
of it, paged attention, times the gate, output projection. Then each has norm, router, and experts, of which the last
always runs. All that is computed is added to the residual stream. Norms multiply by one plus their weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from microscale.models.batch import ForwardBatch
from microscale.models.config import LayerKind
from microscale.models.draft_heads.layer import join
from microscale.models.dummy_weights import META
from microscale.models.pre_norm import Added, PreNormLayer, PreNormModel, ResidualLayer, attention_spec, small_spec
from microscale.models.qwen3_5.config import Qwen35Config
from microscale.models.qwen3_5.weights import Qwen35Layer
from microscale.models.rope import computing_on, plain_table
from microscale.planning.ops import (
    AttentionBatch,
    DenseWeights,
    Gate,
    GateKind,
    HeadNorms,
    Ops,
    PagedKv,
    Recurrent,
    RecurrentSpec,
    RecurrentWeights,
    RopeTable,
    Router,
    StateCache,
)

if TYPE_CHECKING:
    from torch import Tensor

GATE = Gate(GateKind.SILU, interleaved=False)


@dataclass(eq=False, kw_only=True)
class GatedAttentionLayer(PreNormLayer):
    """A layer whose attention is multiplied by a gate. Rows of ``qkv`` are queries, keys, values, gates."""

    def forward(
        self, x: Tensor, state: Added, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Added]:
        qkv, gates, x = self._gated(x, state)
        q = self._write(qkv, batch, kv, rope)
        return self._finish(self.attention(q, kv, batch.attention[self.kind]), gates, x)

    def queries(
        self, x: Tensor, state: Added, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        """Queries and their gates, side by side."""
        qkv, gates, x = self._gated(x, state)
        return join(self._write(qkv, batch, kv, rope), gates, dim=1), x

    def attend(self, q: Tensor, x: Tensor, kv: PagedKv, queries: AttentionBatch) -> tuple[Tensor, Added]:
        if not x.shape[0]:
            return x, x
        q, gates = q.chunk(2, dim=1)
        return self._finish(self.attention(q.contiguous(), kv, queries), gates, x)

    def _gated(self, x: Tensor, state: Added) -> tuple[Tensor, Tensor, Tensor]:
        heads, x = self._project(x, state)
        qkv, gates = heads.split((heads.shape[1] - self.config.num_heads, self.config.num_heads), dim=1)
        return qkv, gates, x

    def _finish(self, attended: Tensor, gates: Tensor, x: Tensor) -> tuple[Tensor, Added]:
        return self.feed_forward(self.small.gate_heads(attended, gates), x)


@dataclass(eq=False, kw_only=True)
class LinearLayer(ResidualLayer):
    """A layer with a state in place of attention. ``qkv`` projects to q, k, v and z."""

    recurrent: Recurrent

    @property
    def uses(self) -> dict[str, str]:
        return {
            "qkv": "linear_in",
            "recurrent": self.kind.value,
            "o": "linear_out",
            "experts": "experts",
        }

    def forward(self, x: Tensor, state: Added, batch: ForwardBatch, kv: Any, rope: RopeTable) -> tuple[Tensor, Added]:
        assert isinstance(kv, StateCache)
        assert batch.states is not None
        normed, x = self.first_norm(x, state)
        recalled = self.recurrent(self.qkv(normed), normed, kv, batch.states)
        return self.feed_forward(recalled, x)


class Qwen35(PreNormModel[Qwen35Config, Qwen35Layer]):
    """The whole model."""

    def bind_layer(self, layer_idx: int, tensors: Qwen35Layer) -> GatedAttentionLayer | LinearLayer:
        kind = self.config.layer_kinds[layer_idx]
        if kind is LayerKind.LINEAR:
            return self._linear(tensors)
        return bind_attention(self.config, tensors, self.ops, self.device, self.page_size)

    def _linear(self, tensors: Qwen35Layer) -> LinearLayer:
        config, ops = self.config, self.ops
        assert tensors.linear_in is not None
        assert tensors.linear_out is not None
        qkv = ops.dense("linear_in", DenseWeights(tensors.linear_in))
        weights: RecurrentWeights = ops.computed(partial(self._state_weights, tensors))
        recurrent = ops.recurrent(LayerKind.LINEAR.value, self.states, weights)
        o = ops.dense("linear_out", DenseWeights(tensors.linear_out))
        return LinearLayer(
            kind=LayerKind.LINEAR,
            config=config,
            attn_norm=around_one(tensors.attn_norm, ops),
            qkv=qkv,
            recurrent=recurrent,
            o=o,
            **_feed_forward(config, tensors, ops),
        )

    def _state_weights(self, tensors: Qwen35Layer) -> RecurrentWeights:
        assert tensors.linear_gates is not None
        assert tensors.conv is not None
        assert tensors.a_log is not None
        assert tensors.dt_bias is not None
        assert tensors.linear_norm is not None
        a_log = tensors.a_log.float()
        conv, decay = tensors.conv[:, 0].contiguous(), a_log if a_log.is_meta else -a_log.exp()
        return RecurrentWeights(
            tensors.linear_gates.to(self.ops.dtype),
            conv,
            decay,
            tensors.dt_bias.float(),
            tensors.linear_norm.float(),
            self.config.rms_epsilon,
        )

    def bind_norm(self, weight: Tensor) -> None:
        self.norm = around_one(weight, self.ops)

    def rope_table(self) -> RopeTable:
        return rope_table(self.config, self.device)

    @property
    def states(self) -> RecurrentSpec:
        heads, activations = self.config.linear, self.ops.activations
        sizes = heads.num_key_heads, heads.num_heads, heads.key_dim, heads.value_dim, heads.taps
        return RecurrentSpec(*sizes, self.config.hidden, activations, tokens=1)


def bind_attention(
    config: Qwen35Config, tensors: Qwen35Layer, ops: Ops, device: torch.device, page_size: int
) -> GatedAttentionLayer:
    assert tensors.qkv is not None
    assert tensors.q_norm is not None
    assert tensors.k_norm is not None
    assert tensors.o is not None
    turned = _turned(config)
    q_norm, k_norm = (around_one(norm, ops, turned) for norm in (tensors.q_norm, tensors.k_norm))
    spec = attention_spec(config, LayerKind.FULL, ops, page_size, sinks=False)
    # Another order of rows; a shape alone has none.
    rows = tensors.qkv if device.type == META else tensors.qkv[_rows(config)]
    qkv = ops.dense("qkv", DenseWeights(rows), behind_sum=True)
    attention = ops.attention(LayerKind.FULL.value, spec, None)
    return GatedAttentionLayer(
        kind=LayerKind.FULL,
        config=config,
        attn_norm=around_one(tensors.attn_norm, ops),
        qkv=qkv,
        head_norms=HeadNorms(q_norm, k_norm, config.rms_epsilon, values=False),
        attention=attention,
        o=ops.dense("o", DenseWeights(tensors.o)),
        **_feed_forward(config, tensors, ops),
    )


def _feed_forward(config: Qwen35Config, tensors: Qwen35Layer, ops: Ops) -> dict[str, Any]:
    return {
        "mlp_norm": around_one(tensors.mlp_norm, ops),
        "router": Router(tensors.router.to(ops.dtype), always=True),
        "experts": ops.experts("experts", tensors.gate_up, tensors.down, config.top_k, GATE),
        "small": ops.small(small_spec(config, ops)),
        "ranks": ops.ranks,
    }


def around_one(weight: Tensor, ops: Ops, order: list[int] | None = None) -> Tensor:
    """What a norm multiplies by, in this order and in float32: in bf16 a small weight would be lost next to the one."""

    def made() -> Tensor:
        if weight.is_meta:  # a shape alone: see ``draft_heads/layer.py``
            return torch.empty(weight.shape, device=weight.device)
        return (weight if order is None else weight[order]).float() + 1

    return ops.computed(made)


def rope_table(config: Qwen35Config, device: torch.device) -> RopeTable:
    """Frequencies of the pairs that turn, then zeros."""
    table = plain_table(config.rope, config.rotary_dim, computing_on(device))
    still = table.inverse_frequencies.new_zeros((config.head_dim - config.rotary_dim) // 2)
    return replace(table, inverse_frequencies=torch.cat((table.inverse_frequencies, still)).to(device))


def _turned(config: Qwen35Config) -> list[int]:
    """The dimensions of a head in the order in which kernels have them: dimension i turns with i + head_dim / 2. Here
    the first ones turn, i with i + rotary_dim / 2. Scores do not depend on the order."""
    turning, half = config.rotary_dim // 2, config.head_dim // 2
    low = [*range(turning), *range(2 * turning, half + turning)]
    high = [*range(turning, 2 * turning), *range(half + turning, 2 * half)]
    return low + high


def _rows(config: Qwen35Config) -> list[int]:
    """The rows of the checkpoint's q with gates, k and v, as queries, keys, values, gates."""
    size, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    turned = _turned(config)
    queries = [2 * size * head + row for head in range(heads) for row in turned]
    gates = [2 * size * head + size + row for head in range(heads) for row in range(size)]
    first_key, first_value = 2 * size * heads, size * (2 * heads + kv_heads)
    keys = [first_key + size * head + row for head in range(kv_heads) for row in turned]
    values = list(range(first_value, first_value + size * kv_heads))
    return [*queries, *keys, *values, *gates]
