"""DFlash: the same code runs on plain references and on the fast kernels.

What was tapped of a certain row becomes, through ``fc`` and a norm, the *context*: every layer has keys and values of
it, and nothing else is computed of it. A block (the token after the last row, then masks) runs through all layers; each
of its tokens sees the context and the whole block. The target's own lm_head gives the draft at each mask.

A layer projects context and block in one call, so its weights are read once. Each token of the block is a sequence of
its own to attention, as long as the block's end: that is how it sees what comes after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.models.batch import KvCache
from microscale.models.decoder import without_gradients
from microscale.models.draft_heads.config import DFlashConfig, head_rope_table
from microscale.models.draft_heads.drafting import TargetEnds, Verified, guess
from microscale.models.draft_heads.layer import FULL, HeadLayer, count_up, following, join, new_cache, slots_of
from microscale.models.draft_heads.weights import HeadWeights
from microscale.planning.ops import AttentionBatch, DenseWeights, Logits, Ops

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Block:
    """The blocks of all sequences, one after the other."""

    positions: Tensor  # [tokens] int64
    slots: Tensor  # [tokens] int64
    queries: AttentionBatch


class DFlash:
    """The whole head."""

    guesses_in_turn = False
    rows_hold_next_token = False

    def __init__(self, weights: HeadWeights, ops: Ops, device: torch.device, page_size: int, ends: TargetEnds) -> None:
        config, tensors = weights.config, weights.tensors(device)
        assert isinstance(config, DFlashConfig)
        self.config = config
        self.ops = ops
        self.device = device
        self.page_size = page_size
        self.epsilon = config.layer.rms_epsilon
        self.embed, self.lm_head = ends.embed, ends.lm_head
        self.fc = ops.dense("fc", DenseWeights(tensors.fc))
        self.hidden_norm, self.norm = tensors.hidden_norm.to(ops.dtype), tensors.norm.to(ops.dtype)
        self.layers = [
            HeadLayer(config.layer, weights.layer(layer_idx, device), ops, page_size)
            for layer_idx in range(config.num_layers)
        ]
        self.rope = ops.computed(lambda: head_rope_table(config.layer.rope, config.layer.head_dim, device))

    def new_cache(self, num_pages: int) -> KvCache:
        return new_cache(self.config, self.ops, num_pages, self.page_size, self.device)

    @without_gradients
    def draft(self, verified: Verified, kv: KvCache, count: int) -> Tensor:
        sequences = verified.last.rows.shape[0]
        logits = self.forward(verified, kv, count)
        if logits is None:
            return torch.empty((sequences, count), dtype=torch.int64, device=self.device)
        drafts = torch.empty(sequences * count, dtype=torch.int64, device=self.device)
        guess(logits, self, self.layers[0].small, drafts)
        return drafts.view(sequences, count)

    @without_gradients
    def forward(self, verified: Verified, kv: KvCache, count: int) -> Logits | None:
        """Logits ``[sequences * count, vocabulary]`` of the masks, sequence by sequence; ``None`` without any."""
        batch, small = verified.batch, self.layers[0].small
        context = small.rms_norm(self.fc(verified.tapped), self.hidden_norm, self.epsilon)
        tokens, block = self._block(verified, count)
        positions = join(batch.positions, block.positions)
        slots = join(batch.slots[FULL], block.slots)
        x, added = self.embed(tokens.flatten()), None
        for layer, layer_kv in zip(self.layers, kv.layers, strict=True):
            if added is None:
                normed = small.rms_norm(x, layer.input_norm, self.epsilon)
            else:
                normed, x = small.add_rms_norm(added, x, layer.input_norm, self.epsilon)
            q = layer.queries(join(context, normed), positions, slots, layer_kv, self.rope)
            x, added = layer.attend(q[context.shape[0] :], x, layer_kv, block.queries)
        if not tokens.numel():
            return None
        assert added is not None  # there is a layer
        normed, _ = small.add_rms_norm(added, x, self.norm, self.epsilon)
        masks = normed.view(*tokens.shape, -1)[:, 1:].flatten(0, 1)
        return self.lm_head.logits(masks)

    def _block(self, verified: Verified, count: int) -> tuple[Tensor, Block]:
        """The tokens ``[sequences, count + 1]`` of each sequence's block; none where nothing is to be drafted."""
        last, first = verified.last.attention[FULL], verified.batch.token_ids.index_select(0, verified.last.rows)
        size = count + 1 if count else 0
        tokens = torch.full((first.shape[0], size), self.config.mask_token, dtype=torch.int64, device=self.device)
        tokens[:, :1] = first[:, None]
        positions = following(last, size)
        starts = count_up(tokens.numel() + 1, self.device, torch.int32)
        # Copies, also of one sequence: kernels read lengths one after the other.
        lens = last.context_lens.new_empty(tokens.shape).copy_(last.context_lens[:, None]).add_(size).flatten()
        tables = last.page_table[:, None].expand(-1, size, -1).flatten(0, 1).contiguous()
        queries = AttentionBatch(starts, lens, tables, 1)
        slots = slots_of(last.page_table, positions, self.page_size)
        return tokens, Block(positions.flatten(), slots.flatten(), queries)
