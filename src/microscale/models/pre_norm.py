"""Models whose layers norm what they read and add what they compute: gpt-oss's and Qwen3-MoE's arithmetic, once.

A layer is: norm, fused QKV (its heads may be normed), rotary positions, paged attention, output projection; norm,
router, mixture of experts. Each sum with the residual stream is left to the norm that reads it, and in small batches
the sum of a token's experts too: one launch for all of it. A token alone has its experts added up in their last GEMM,
and is added to the stream and normed in QKV's launch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar

import torch

from microscale.errors import BadConfig
from microscale.formats import BLOCK
from microscale.models.batch import ForwardBatch
from microscale.models.config import (
    NO_SLIDING_LAYERS,
    LayerKind,
    check_blocks,
    check_end_tokens,
    check_heads,
    check_positive,
    check_top_k,
    last_of_each,
)
from microscale.models.decoder import Decoder
from microscale.parallel.sharding import WHOLE, Shard, split_heads, split_width
from microscale.planning.ops import (
    Attention,
    AttentionBatch,
    AttentionSpec,
    Dense,
    HeadNorms,
    Logits,
    Moe,
    Ops,
    PagedKv,
    Parts,
    RankSums,
    RopeTable,
    Router,
    Small,
    SmallSpec,
)

if TYPE_CHECKING:
    from torch import Tensor


Sum: TypeAlias = "Tensor | Parts"
"""A layer's result: summed, or with a sum that is left to the norm that reads it."""
Added: TypeAlias = "Sum | None"
"""What is still to be added to the residual stream: nothing before the first layer."""


@dataclass(frozen=True, kw_only=True)
class PreNormConfig:
    """The architecture of a model of such layers."""

    num_layers: int
    hidden: int
    intermediate: int
    """Width of one expert after the gate; ``gate_up`` has twice as many rows."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]
    sliding_window: int = NO_SLIDING_LAYERS
    """Number of positions that a sliding layer sees, including the token itself."""
    rms_epsilon: float
    max_context: int
    eos_token_ids: tuple[int, ...]
    tied: bool = False
    """lm_head is the embedding table."""
    weights_only: bool = False
    """NVFP4 weights are published for activations in BF16."""
    shard: Shard = WHOLE
    """The rank that this part of the model belongs to: heads and widths above are the rank's own."""

    def __post_init__(self) -> None:
        check_positive(self, "num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim")
        check_positive(self, "num_experts", "top_k", "vocab_size", "sliding_window", "rms_epsilon", "max_context")
        if len(self.layer_kinds) != self.num_layers:
            raise BadConfig(f"{len(self.layer_kinds)} layer kinds do not describe {self.num_layers} layers.")
        check_heads(self.num_heads, self.num_kv_heads, self.head_dim)
        check_blocks(self, BLOCK, "hidden", "intermediate")
        check_top_k(self.top_k, self.num_experts)
        check_end_tokens(self)

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def sharded(self, shard: Shard) -> Self:
        """One rank's part: its heads, and its width of every expert."""
        heads = split_heads(self.num_heads, self.num_kv_heads, shard)
        return replace(
            self,
            num_heads=len(heads.heads),
            num_kv_heads=len(heads.kv_heads),
            intermediate=split_width(self.intermediate, BLOCK, shard).size,
            shard=shard,
        )

    def shortened(self) -> Self:
        """The model with one layer of each kind: all kernels, in the time of two layers. With one kind it has two
        layers: the first one reads the embedding, the other a sum."""
        kinds = tuple(self.layer_kinds[place] for place in last_of_each(self.layer_kinds))
        if len(kinds) == 1:
            kinds *= min(2, self.num_layers)
        return replace(self, num_layers=len(kinds), layer_kinds=kinds)


@dataclass(eq=False, kw_only=True)
class ResidualLayer(ABC):
    """What all such layers have, bound to its kernels. A profile replaces them by its own."""

    kind: LayerKind
    config: PreNormConfig
    attn_norm: Tensor
    qkv: Dense
    o: Dense
    mlp_norm: Tensor
    router: Router
    experts: Moe
    small: Small
    ranks: RankSums

    @property
    @abstractmethod
    def uses(self) -> dict[str, str]:
        """What plans call the bound parts."""

    @abstractmethod
    def forward(
        self, x: Tensor, state: Added, batch: ForwardBatch, kv: Any, rope: RopeTable
    ) -> tuple[Tensor, Added]: ...

    def add_norm(self, added: Sum, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the residual stream with what is to be added to it, and that."""
        return self.small.add_rms_norm(added, x, weight, self.config.rms_epsilon)

    def first_norm(self, x: Tensor, added: Added) -> tuple[Tensor, Tensor]:
        """The norm that the layer begins with, and the residual stream."""
        if added is None:
            return self.small.rms_norm(x, self.attn_norm, self.config.rms_epsilon), x
        return self.add_norm(added, x, self.attn_norm)

    def feed_forward(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Sum]:
        added = self.ranks.sum(self.o(attended))
        normed, x, routing = self.small.add_norm_route(
            added, x, self.mlp_norm, self.config.rms_epsilon, self.router, self.config.top_k
        )
        if self.ranks.world == 1 and self.experts.why_not_parts(x.shape[0]) is None:
            return x, self.experts.parts(normed, routing)
        return x, self.ranks.sum(self.experts(normed, routing))


@dataclass(eq=False, kw_only=True)
class PreNormLayer(ResidualLayer):
    """A layer with attention."""

    head_norms: HeadNorms | None
    attention: Attention

    @property
    def uses(self) -> dict[str, str]:
        """What plans call the bound parts."""
        return {"qkv": "qkv", "o": "o", "experts": "experts", "attention": self.kind.value}

    def forward(
        self, x: Tensor, state: Added, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Added]:
        qkv, x = self._project(x, state)
        queries = batch.attention[self.kind]
        if self.attention.why_not_fused_heads(qkv, self.head_norms, kv, queries) is None:
            attended = self.attention.from_heads(qkv, rope, self.head_norms, kv, queries)
            return self.feed_forward(attended.flatten(1), x)
        return self.attend(self._write(qkv, batch, kv, rope), x, kv, queries)

    def queries(
        self, x: Tensor, state: Added, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        qkv, x = self._project(x, state)
        return self._write(qkv, batch, kv, rope), x

    def attend(self, q: Tensor, x: Tensor, kv: PagedKv, queries: AttentionBatch) -> tuple[Tensor, Added]:
        if not x.shape[0]:
            return x, x
        return self.feed_forward(self.attention(q, kv, queries).flatten(1), x)

    def _project(self, x: Tensor, added: Added) -> tuple[Tensor, Tensor]:
        epsilon = self.config.rms_epsilon
        if isinstance(added, torch.Tensor) and self.qkv.why_not_fused_norm(x.shape[0]) is None:
            qkv, x = self.qkv.from_sum(added, x, self.attn_norm, epsilon)
            return qkv.view(x.shape[0], -1, self.config.head_dim), x
        normed, x = self.first_norm(x, added)
        return self.qkv(normed).view(x.shape[0], -1, self.config.head_dim), x

    def _write(self, qkv: Tensor, batch: ForwardBatch, kv: PagedKv, rope: RopeTable) -> Tensor:
        heads, slots = self.config.num_heads, batch.slots[self.kind]
        return self.small.rope_and_write_kv(qkv, heads, batch.positions, rope, kv, slots, self.head_norms)


Config = TypeVar("Config", bound=PreNormConfig)
LayerTensors = TypeVar("LayerTensors")


def attention_spec(config: PreNormConfig, kind: LayerKind, ops: Ops, page_size: int, *, sinks: bool) -> AttentionSpec:
    return AttentionSpec(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        window=config.sliding_window if kind is LayerKind.SLIDING else None,
        sinks=sinks,
        page_size=page_size,
        activations=ops.activations,
        tokens=1,
        context=config.max_context,
    )


def small_spec(config: PreNormConfig, ops: Ops) -> SmallSpec:
    return SmallSpec(
        hidden=config.hidden,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_experts=config.num_experts,
        top_k=config.top_k,
        activations=ops.activations,
        tokens=1,
    )


class PreNormModel(Decoder[Added], Generic[Config, LayerTensors]):
    """A whole model of such layers. A family defines how a layer is bound to its kernels, and its rope."""

    config: Config
    layers: Sequence[ResidualLayer]

    @abstractmethod
    def bind_layer(self, layer_idx: int, tensors: LayerTensors) -> ResidualLayer: ...

    @abstractmethod
    def rope_table(self) -> RopeTable: ...

    def bind_norm(self, weight: Tensor) -> None:
        self.norm = weight.to(self.ops.dtype)

    def rope_tables(self) -> dict[LayerKind, RopeTable]:
        return dict.fromkeys(self.config.layer_kinds, self.rope_table())

    def head_shapes(self) -> dict[LayerKind, tuple[int, int]]:
        return dict.fromkeys(LayerKind, (self.config.num_kv_heads, self.config.head_dim))

    def begin(self, token_ids: Tensor) -> tuple[Tensor, Added]:
        return self.embed(token_ids), None

    def stream(self, x: Tensor, state: Added, out: Tensor) -> None:
        if state is None:
            out.copy_(x)
        # Summed here, and once more by the norm: three layers of all are tapped.
        elif isinstance(state, Parts):
            # By the norm's kernel, which is compiled already, for its sum alone.
            out.copy_(self.layers[0].add_norm(state, x, self.norm)[1])
        else:
            torch.add(x, state, out=out)

    def end(self, x: Tensor, state: Added) -> Logits:
        assert state is not None  # there is a layer
        x, _ = self.layers[-1].add_norm(state, x, self.norm)
        return self.lm_head.logits(x)
