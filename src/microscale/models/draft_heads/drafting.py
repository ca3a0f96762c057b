"""The interface of draft heads of every kind: after a step of the target, a head drafts the next tokens.

A *row* is one token that the target has computed: its position, where its keys and values go, what was tapped behind
it, and the token that follows it, which the target has chosen by then. The rows of a head lie in pages of its own
(``new_cache``) under the page table and the slots of the target's full layers.

Not every row of a verify step is *certain*: a draft that was rejected leaves rows behind the last accepted token. Their
slots must lead to the scratch page. The last certain row of each sequence is its row of ``batch.logits``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from microscale.models.batch import ForwardBatch, KvCache, LogitRows
from microscale.models.draft_heads.config import HeadConfig
from microscale.models.draft_heads.layer import count_up
from microscale.planning.ops import Dense, Embedding, Logits, Ops, RankSums, Small

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TargetEnds:
    """What a head may share with its target."""

    embed: Embedding
    lm_head: Dense
    norm: Tensor | None = None
    """Factors of its final norm ``[hidden]``, for a head that reads the target after this norm."""


@dataclass(frozen=True)
class Verified:
    """The rows of one step of the target."""

    batch: ForwardBatch
    """``token_ids``: the token after each row. ``logits``: the last certain row of each sequence that gets drafts; the
    lengths in it end with that row. A sequence whose prompt goes on has none. ``None``: every sequence has one row."""
    tapped: Tensor  # [rows, taps * hidden], as ``Taps.rows``

    @property
    def last(self) -> LogitRows:
        """The last rows of the sequences that get drafts."""
        if self.batch.logits is not None:
            return self.batch.logits
        return LogitRows(count_up(self.tapped.shape[0], self.tapped.device), self.batch.attention)


class DraftHead(Protocol):
    """A bound head."""

    ops: Ops
    device: torch.device
    page_size: int

    @property
    def config(self) -> HeadConfig: ...

    @property
    def guesses_in_turn(self) -> bool:
        """It makes a pass for each token: the first ones are the same however many are drafted."""

    @property
    def rows_hold_next_token(self) -> bool:
        """Keys and values of a row depend on the token after it, so those of a page's last row on a token that is not
        in the page."""

    def new_cache(self, num_pages: int) -> KvCache:
        """Pages of its own, as many as the target's full layers have."""

    def draft(self, verified: Verified, kv: KvCache, count: int) -> Tensor:
        """Drafts ``[sequences, count]`` int64, ids of the target, on the device; nothing is read back.

        The page table of each sequence must reach ``count + 1`` positions beyond its last row, as the target needs it
        to verify them. With ``count`` 0 the rows' keys and values are written, and nothing is drafted.
        """


def guess(logits: Logits, head: DraftHead, small: Small, out: Tensor, target_ids: Tensor | None = None) -> None:
    """Into ``out [rows]`` the token with the largest logit of each row, the lowest of equals, from what lm_head knows
    of its blocks: no second pass over the vocabulary. ``target_ids``: the target's ids of the head's tokens."""
    if head.config.shard.is_whole:
        small.likeliest(logits.block_max, logits.block_argmax, target_ids, out)
    else:
        tokens = likeliest_of_ranks(logits, head.config, head.ops.ranks)
        out.copy_(tokens if target_ids is None else target_ids.index_select(0, tokens))


def likeliest_of_ranks(logits: Logits, config: HeadConfig, ranks: RankSums) -> Tensor:
    """The same where each rank has the logits of some tokens: it sends its largest one and its token to all others."""
    rows, device = logits.block_max.shape[0], logits.block_max.device
    # A sum in which each rank has columns of its own: what is added to a number is zeros, so it arrives as it is.
    # Token ids are below 2**24, which float32 holds.
    sent = torch.zeros((rows, 2 * config.shard.world), dtype=torch.float32, device=device)
    if sent.is_meta:  # a shape alone: see ``layer.py``
        return ranks.sum(sent).new_empty(rows, dtype=torch.int64)
    _fill_own(logits, config, sent)
    largest, tokens = ranks.sum(sent).chunk(2, dim=1)  # [rows, ranks]
    return tokens.gather(1, largest.argmax(-1, keepdim=True))[:, 0].to(torch.int64)


def _fill_own(logits: Logits, config: HeadConfig, sent: Tensor) -> None:
    """This rank's largest logit and its token, into its columns of ``sent [rows, 2 * ranks]``."""
    world, rank = config.shard.world, config.shard.rank
    block = logits.block_max.argmax(-1, keepdim=True)
    sent[:, rank] = logits.block_max.gather(1, block)[:, 0]
    sent[:, world + rank] = (logits.block_argmax.gather(1, block)[:, 0] + config.own_rows.start).float()
