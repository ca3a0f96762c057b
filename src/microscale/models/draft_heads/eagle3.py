"""EAGLE3: the same code runs on plain references and on the fast kernels.

A row is a position of the target: what was tapped there, through ``fc`` to one hidden state, and the token after it.
The normed embedding of that token next to the normed state go through attention, a dense MLP and lm_head, which gives
the token after that. The state that comes out is the next row's, so the head continues by itself from draft to draft.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.decoder import without_gradients
from microscale.models.draft_heads.config import Eagle3Config, head_rope_table
from microscale.models.draft_heads.drafting import TargetEnds, Verified, guess
from microscale.models.draft_heads.layer import FULL, HeadLayer, Steps, join, new_cache
from microscale.models.draft_heads.weights import HeadWeights
from microscale.planning.ops import DenseWeights, Logits, Ops

if TYPE_CHECKING:
    from torch import Tensor


class Eagle3:
    """The whole head."""

    guesses_in_turn = True
    rows_hold_next_token = True

    def __init__(self, weights: HeadWeights, ops: Ops, device: torch.device, page_size: int, ends: TargetEnds) -> None:
        config, tensors = weights.config, weights.tensors(device)
        assert isinstance(config, Eagle3Config)
        self.config = config
        self.ops = ops
        self.device = device
        self.page_size = page_size
        self.epsilon = config.layer.rms_epsilon
        dtype = ops.dtype
        self.fc = ops.dense("fc", DenseWeights(tensors.fc))
        self.fc_norm = None if tensors.fc_norm is None else tensors.fc_norm.to(dtype)
        self.embed = ends.embed if tensors.embed is None else ops.embed(tensors.embed)
        self.layer = HeadLayer(config.layer, weights.layer(0, device), ops, page_size)
        both = self.layer.input_norm, tensors.hidden_norm.to(dtype)
        self.norms = ops.computed(lambda: join(both[0][None], both[1][None]))
        """Of the embedding and of the hidden state ``[2, hidden]``."""
        self.norm = tensors.norm.to(dtype)
        self.lm_head = ends.lm_head
        if tensors.lm_head is not None:
            self.lm_head = ops.dense("lm_head", DenseWeights(tensors.lm_head))
        self.target_ids: Tensor | None = None
        """The target's id of each draft token; ``None`` where they are the same."""
        if tensors.d2t is not None:
            self.target_ids = ops.computed(partial(target_ids, tensors.d2t))
        self.rope = ops.computed(lambda: head_rope_table(config.layer.rope, config.layer.head_dim, device))

    def new_cache(self, num_pages: int) -> KvCache:
        return new_cache(self.config, self.ops, num_pages, self.page_size, self.device)

    @without_gradients
    def combine(self, tapped: Tensor) -> Tensor:
        """One hidden state from the taps of a row: ``[rows, taps * target's hidden]`` → ``[rows, hidden]``."""
        small = self.layer.small
        if self.config.norm_before_fc:
            tapped = small.rms_norm(tapped, self.fc_norm, self.epsilon)
        elif self.fc_norm is not None:
            each = tapped.reshape(-1, self.config.reads.target_hidden)
            normed = small.rms_norm(each, None, self.epsilon).view(tapped.shape)
            tapped = normed if normed.is_meta else normed * self.fc_norm  # a shape alone: see ``layer.py``
        return self.fc(tapped)

    @without_gradients
    def forward(self, batch: ForwardBatch, kv: KvCache, hidden: Tensor) -> tuple[Logits, Tensor]:
        """Logits of the draft vocabulary and hidden states, of the rows in ``batch.logits``, or of all.

        ``batch.token_ids`` are the tokens after the rows; ``hidden [rows, hidden]`` is from ``combine`` or from the row
        before.
        """
        layer, layer_kv, small = self.layer, kv.layers[0], self.layer.small
        both, x = self._read(batch.token_ids, hidden)
        wanted = batch.logits
        if wanted is None:
            x, added = layer.forward(both, x, batch, layer_kv, self.rope)
        else:
            q = layer.queries(both, batch.positions, batch.slots[FULL], layer_kv, self.rope)
            q, x = (part.index_select(0, wanted.rows) for part in (q, x))
            x, added = layer.attend(q, x, layer_kv, wanted.attention[FULL])
        normed, x = small.add_rms_norm(added, x, self.norm, self.epsilon)
        return self.lm_head.logits(normed), normed if self.config.norm_output else x

    def _read(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the layer reads, and the residual stream that it adds to."""
        small, table = self.layer.small, self.embed.table
        if table is not None:
            both = small.norm_pair(table, token_ids, hidden, self.norms, self.epsilon)
        else:
            embedded = small.rms_norm(self.embed(token_ids), self.norms[0], self.epsilon)
            both = join(embedded, small.rms_norm(hidden, self.norms[1], self.epsilon), dim=1)
        return both, both[:, self.config.layer.hidden :] if self.config.norm_before_residual else hidden

    @without_gradients
    def draft(self, verified: Verified, kv: KvCache, count: int) -> Tensor:
        batch, last = verified.batch, verified.last.attention[FULL]
        rows = verified.last.rows.shape[0]
        if not count or not rows:
            both, _ = self._read(batch.token_ids, self.combine(verified.tapped))
            self.layer.queries(both, batch.positions, batch.slots[FULL], kv.layers[0], self.rope)
            return torch.empty((rows, count), dtype=torch.int64, device=self.device)
        drafts = torch.empty((rows, count), dtype=torch.int64, device=self.device)
        steps, small = Steps(last, count - 1, self.page_size), self.layer.small
        logits, hidden = self.forward(batch, kv, self.combine(verified.tapped))
        guess(logits, self, small, drafts[:, 0], self.target_ids)
        for step in range(count - 1):
            logits, hidden = self.forward(steps.batch(step, drafts[:, step]), kv, hidden)
            guess(logits, self, small, drafts[:, step + 1], self.target_ids)
        return drafts


def target_ids(d2t: Tensor) -> Tensor:
    """The target's id of each draft token, from its difference to the draft's own."""
    return d2t.new_empty(d2t.shape) if d2t.is_meta else d2t + torch.arange(d2t.shape[0], device=d2t.device)
