"""Models whose layers norm what they read and add what they compute: gpt-oss's and Qwen3-MoE's arithmetic, once.

A layer is: norm, fused QKV (its heads may be normed), rotary positions, paged attention, output projection; norm,
router, mixture of experts. Each sum with the residual stream is left to the norm that reads it, and in small batches
the sum of a token's experts too: one launch for all of it. A token alone has its experts added up in their last GEMM,
and is added to the stream and normed in QKV's launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from microscale.backends.ops import (
    Attention,
    AttentionBatch,
    Dense,
    Embedding,
    HeadNorms,
    Logits,
    Moe,
    PagedKv,
    Parts,
    Ranks,
    RopeTable,
    Router,
    Small,
)
from microscale.models.batch import ForwardBatch
from microscale.models.config import LayerKind
from microscale.models.decoder import Decoder

if TYPE_CHECKING:
    from torch import Tensor


Sum: TypeAlias = "Tensor | Parts"
"""What a layer answers: summed, or with a sum that is left to the norm that reads it."""
Added: TypeAlias = "Sum | None"
"""What is still to be added to the residual stream: nothing before the first layer."""


@dataclass(frozen=True)
class LayerSizes:
    """The numbers of a layer that its arithmetic needs."""

    num_heads: int
    head_dim: int
    top_k: int
    rms_epsilon: float


@dataclass(eq=False)
class PreNormLayer:
    """One layer, bound to its kernels. A profile puts its own in their place."""

    kind: LayerKind
    sizes: LayerSizes
    attn_norm: Tensor
    qkv: Dense
    head_norms: HeadNorms | None
    attention: Attention
    o: Dense
    mlp_norm: Tensor
    router: Router
    experts: Moe
    small: Small
    ranks: Ranks

    @property
    def uses(self) -> dict[str, str]:
        """What plans call the bound parts."""
        return {"qkv": "qkv", "o": "o", "experts": "experts", "attention": self.kind.value}

    def forward(
        self, x: Tensor, state: Added, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Added]:
        qkv, x = self._project(x, state)
        queries = batch.attention[self.kind]
        if self.attention.refuses_heads(qkv, self.head_norms, kv, queries) is None:
            return self._feed_forward(self.attention.from_heads(qkv, rope, self.head_norms, kv, queries), x)
        return self.attend(self._write(qkv, batch, kv, rope), x, kv, queries)

    def queries(
        self, x: Tensor, state: Added, batch: ForwardBatch, kv: PagedKv, rope: RopeTable
    ) -> tuple[Tensor, Tensor]:
        qkv, x = self._project(x, state)
        return self._write(qkv, batch, kv, rope), x

    def attend(self, q: Tensor, x: Tensor, kv: PagedKv, queries: AttentionBatch) -> tuple[Tensor, Added]:
        if not x.shape[0]:
            return x, x
        return self._feed_forward(self.attention(q, kv, queries), x)

    def _project(self, x: Tensor, added: Added) -> tuple[Tensor, Tensor]:
        epsilon = self.sizes.rms_epsilon
        if isinstance(added, torch.Tensor) and self.qkv.refuses_sum(x.shape[0]) is None:
            qkv, x = self.qkv.from_sum(added, x, self.attn_norm, epsilon)
            return qkv.view(x.shape[0], -1, self.sizes.head_dim), x
        if added is None:
            normed = self.small.rms_norm(x, self.attn_norm, epsilon)
        else:
            normed, x = self.add_norm(added, x, self.attn_norm)
        return self.qkv(normed).view(x.shape[0], -1, self.sizes.head_dim), x

    def _write(self, qkv: Tensor, batch: ForwardBatch, kv: PagedKv, rope: RopeTable) -> Tensor:
        heads, slots = self.sizes.num_heads, batch.slots[self.kind]
        return self.small.rope_and_write_kv(qkv, heads, batch.positions, rope, kv, slots, self.head_norms)

    def add_norm(self, added: Sum, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of the residual stream with what is to be added to it, and that."""
        return self.small.add_rms_norm(added, x, weight, self.sizes.rms_epsilon)

    def _feed_forward(self, attended: Tensor, x: Tensor) -> tuple[Tensor, Sum]:
        added = self.ranks.sum(self.o(attended.flatten(1)))
        normed, x, routing = self.small.add_norm_route(
            added, x, self.mlp_norm, self.sizes.rms_epsilon, self.router, self.sizes.top_k
        )
        if self.ranks.world == 1 and self.experts.refuses_parts(x.shape[0]) is None:
            return x, self.experts.parts(normed, routing)
        return x, self.ranks.sum(self.experts(normed, routing))


class PreNormModel(Decoder[Added]):
    """A whole model of such layers."""

    embed: Embedding
    norm: Tensor
    lm_head: Dense
    layers: Sequence[PreNormLayer]

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
