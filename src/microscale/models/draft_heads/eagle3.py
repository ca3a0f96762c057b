"""EAGLE3: the same code runs on plain references and on the fast kernels.

A row's hidden state is what was tapped there, through ``fc``. The normed embedding and state, side by side, go through
attention, a dense MLP and lm_head.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from microscale.models.batch import ForwardBatch
from microscale.models.decoder import without_gradients
from microscale.models.draft_heads.chain import ChainHead
from microscale.models.draft_heads.config import Eagle3Config, head_rope_table
from microscale.models.draft_heads.drafting import TargetEnds
from microscale.models.draft_heads.layer import FULL, HeadLayer, join
from microscale.models.draft_heads.weights import HeadWeights
from microscale.planning.ops import DenseWeights, Ops, PagedKv

if TYPE_CHECKING:
    from torch import Tensor


class Eagle3(ChainHead):
    """The whole head."""

    config: Eagle3Config
    layer: HeadLayer

    def __init__(self, weights: HeadWeights, ops: Ops, device: torch.device, page_size: int, ends: TargetEnds) -> None:
        config, tensors = weights.config, weights.tensors(device)
        assert isinstance(config, Eagle3Config)
        super().__init__(ops, device, page_size, config.layer.rms_epsilon)
        self.config = config
        self.norm_output = config.norm_output
        dtype = ops.dtype
        self.fc = ops.dense("fc", DenseWeights(tensors.fc))
        self.fc_norm = None if tensors.fc_norm is None else tensors.fc_norm.to(dtype)
        self.embed = ends.embed if tensors.embed is None else ops.embed(tensors.embed)
        self.layer = HeadLayer(config.layer, weights.layer(0, device), ops, page_size)
        both = self.layer.input_norm, tensors.hidden_norm.to(dtype)
        self.norms = ops.computed(lambda: join(both[0][None], both[1][None]))
        self.norm = tensors.norm.to(dtype)
        self.lm_head = ends.lm_head
        if tensors.lm_head is not None:
            self.lm_head = ops.dense("lm_head", DenseWeights(tensors.lm_head))
        if tensors.d2t is not None:
            self.target_ids = ops.computed(partial(target_ids, tensors.d2t))
        self.rope = ops.computed(lambda: head_rope_table(config.layer.rope, config.layer.head_dim, device))

    @without_gradients
    def combine(self, tapped: Tensor) -> Tensor:
        small = self.layer.small
        if self.config.norm_before_fc:
            tapped = small.rms_norm(tapped, self.fc_norm, self.epsilon)
        elif self.fc_norm is not None:
            each = tapped.reshape(-1, self.config.reads.target_hidden)
            normed = small.rms_norm(each, None, self.epsilon).view(tapped.shape)
            tapped = normed if normed.is_meta else normed * self.fc_norm  # a shape alone: see ``layer.py``
        return self.fc(tapped)

    def read(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer reads, and the residual stream that it adds to."""
        both = self.pair(token_ids, hidden)
        return both, both[:, self.config.layer.hidden :] if self.config.norm_before_residual else hidden

    def queries(self, batch: ForwardBatch, kv: PagedKv, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both, x = self.read(batch.token_ids, hidden)
        return self.layer.queries(both, batch.positions, batch.slots[FULL], kv, self.rope), x


def target_ids(d2t: Tensor) -> Tensor:
    """The target's id of each draft token, from its difference to the draft's own."""
    return d2t.new_empty(d2t.shape) if d2t.is_meta else d2t + torch.arange(d2t.shape[0], device=d2t.device)
