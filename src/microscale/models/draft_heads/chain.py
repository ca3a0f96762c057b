"""What heads share that draft token by token: EAGLE3 and MTP.

A row is a position of the target: a hidden state from what was tapped there, and the token after it. The normed
embedding of that token and the normed state go through one layer and lm_head, which gives the token after that. The
state that comes out is the next row's, so the head continues by itself from draft to draft.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from microscale.models.batch import ForwardBatch, KvCache
from microscale.models.decoder import without_gradients
from microscale.models.draft_heads.config import HeadConfig
from microscale.models.draft_heads.drafting import Verified, guess
from microscale.models.draft_heads.layer import FULL, Steps, join, new_cache
from microscale.planning.ops import Dense, Embedding, Logits, Ops, PagedKv, RopeTable

if TYPE_CHECKING:
    from torch import Tensor


class ChainHead(ABC):
    """A head of one layer. Its constructor binds what is declared here."""

    guesses_in_turn = True
    rows_hold_next_token = True
    norm_output = True
    """The next row reads the hidden state after the last norm, not before it."""
    target_ids: Tensor | None = None
    """The target's id of each draft token; ``None`` where they are the same."""

    config: HeadConfig
    embed: Embedding
    norms: Tensor
    """Of the embedding and of the hidden state ``[2, hidden]``."""
    layer: Any
    """A decoder layer: ``forward``, ``attend`` and ``small``."""
    norm: Tensor
    lm_head: Dense
    rope: RopeTable

    def __init__(self, ops: Ops, device: torch.device, page_size: int, epsilon: float) -> None:
        self.ops = ops
        self.device = device
        self.page_size = page_size
        self.epsilon = epsilon

    @abstractmethod
    def combine(self, tapped: Tensor) -> Tensor:
        """The hidden state of each row: ``[rows, taps * target's hidden]`` → ``[rows, hidden]``."""

    @abstractmethod
    def read(self, token_ids: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the layer's ``forward`` takes first."""

    @abstractmethod
    def queries(self, batch: ForwardBatch, kv: PagedKv, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Write the layer's keys and values; return its queries and the residual stream."""

    def new_cache(self, num_pages: int) -> KvCache:
        return new_cache(self.config, self.ops, num_pages, self.page_size, self.device)

    def pair(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """The normed embeddings and the normed hidden states, side by side."""
        small, table = self.layer.small, self.embed.table
        if table is not None:
            both: Tensor = small.norm_pair(table, token_ids, hidden, self.norms, self.epsilon)
            return both
        embedded = small.rms_norm(self.embed(token_ids), self.norms[0], self.epsilon)
        return join(embedded, small.rms_norm(hidden, self.norms[1], self.epsilon), dim=1)

    @without_gradients
    def forward(self, batch: ForwardBatch, kv: KvCache, hidden: Tensor) -> tuple[Logits, Tensor]:
        """Logits of the draft vocabulary and hidden states, of the rows in ``batch.logits``, or of all.

        ``batch.token_ids`` are the tokens after the rows; ``hidden [rows, hidden]`` is from ``combine`` or from the row
        before.
        """
        layer, layer_kv, wanted = self.layer, kv.layers[0], batch.logits
        if wanted is None:
            x, added = layer.forward(*self.read(batch.token_ids, hidden), batch, layer_kv, self.rope)
        else:
            q, x = (part.index_select(0, wanted.rows) for part in self.queries(batch, layer_kv, hidden))
            x, added = layer.attend(q, x, layer_kv, wanted.attention[FULL])
        normed, x = layer.small.add_rms_norm(added, x, self.norm, self.epsilon)
        return self.lm_head.logits(normed), normed if self.norm_output else x

    @without_gradients
    def draft(self, verified: Verified, kv: KvCache, count: int) -> Tensor:
        batch, last = verified.batch, verified.last.attention[FULL]
        rows = verified.last.rows.shape[0]
        drafts = torch.empty((rows, count), dtype=torch.int64, device=self.device)
        hidden = self.combine(verified.tapped)
        if not count or not rows:
            self.queries(batch, kv.layers[0], hidden)
            return drafts
        steps, small = Steps(last, count - 1, self.page_size), self.layer.small
        logits, hidden = self.forward(batch, kv, hidden)
        guess(logits, self, small, drafts[:, 0], self.target_ids)
        for step in range(count - 1):
            logits, hidden = self.forward(steps.batch(step, drafts[:, step]), kv, hidden)
            guess(logits, self, small, drafts[:, step + 1], self.target_ids)
        return drafts
