"""MTP: the layer for drafts in the checkpoints of Qwen3.5-MoE and Qwen3.6, which predicts the next token but one.

A row's hidden state is the target's after its final norm. The normed embedding and state, side by side, go through
``fc`` and one layer like the target's with attention, then a norm and the target's lm_head. All norms multiply by one
plus their weight.

There is no kernel for experts in BF16, so such experts are held in MXFP8 (``Precision.of_draft_head``): a draft is a
guess that the target verifies, so no answer depends on it. Experts in FP8 blocks stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from microscale.models.batch import ForwardBatch
from microscale.models.decoder import without_gradients
from microscale.models.draft_heads.chain import ChainHead
from microscale.models.draft_heads.config import MtpConfig
from microscale.models.draft_heads.drafting import TargetEnds
from microscale.models.draft_heads.layer import join
from microscale.models.draft_heads.weights import HeadWeights
from microscale.models.qwen3_5.config import Qwen35Config
from microscale.models.qwen3_5.model import GatedAttentionLayer, around_one, bind_attention, rope_table
from microscale.planning.ops import DenseWeights, Ops, PagedKv

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Mtp(ChainHead):
    """The whole head."""

    config: MtpConfig
    layer: GatedAttentionLayer

    def __init__(self, weights: HeadWeights, ops: Ops, device: torch.device, page_size: int, ends: TargetEnds) -> None:
        config, tensors = weights.config, weights.tensors(device)
        assert isinstance(config, MtpConfig)
        assert isinstance(config.layer, Qwen35Config)
        assert tensors.embedding_norm is not None
        assert ends.norm is not None
        super().__init__(ops, device, page_size, config.layer.rms_epsilon)
        self.config = config
        self.embed, self.target_norm, self.lm_head = ends.embed, ends.norm, ends.lm_head
        both = around_one(tensors.embedding_norm, ops), around_one(tensors.hidden_norm, ops)
        self.norms = ops.computed(lambda: join(both[0][None], both[1][None]))
        self.fc = ops.dense("fc", DenseWeights(tensors.fc))
        shape: Qwen35Config = config.layer
        self.layer = bind_attention(shape, weights.layer(0, device), ops, device, page_size)
        self.norm = around_one(tensors.norm, ops)
        self.rope = ops.computed(lambda: rope_table(shape, device))

    @without_gradients
    def combine(self, tapped: Tensor) -> Tensor:
        return self.layer.small.rms_norm(tapped, self.target_norm, self.epsilon)

    def read(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, None]:
        """The residual stream, and nothing that is still to be added to it."""
        return self.fc(self.pair(token_ids, hidden)), None

    def queries(self, batch: ForwardBatch, kv: PagedKv, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer.queries(*self.read(batch.token_ids, hidden), batch, kv, self.rope)
