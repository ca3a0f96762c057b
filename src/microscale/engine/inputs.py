"""From sequences to the tensors of one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from microscale.backends.ops import AttentionBatch
from microscale.models.batch import ForwardBatch
from microscale.models.config import LayerKind


@dataclass(frozen=True)
class Chunk:
    """New tokens of one sequence in one step, and the pages that hold it."""

    token_ids: Sequence[int]
    first_position: int
    pages: Mapping[LayerKind, Sequence[int]]
    num_logits: int
    """How many of its last tokens are to give logits."""

    @property
    def context_len(self) -> int:
        return self.first_position + len(self.token_ids)


def build_batch(chunks: Sequence[Chunk], page_size: int, device: torch.device) -> ForwardBatch:
    """Lay the chunks end to end; rows of logits as the chunks want them, in their order."""
    starts = [0, *accumulate(len(chunk.token_ids) for chunk in chunks)]
    positions = [range(c.first_position, c.context_len) for c in chunks]
    query_start = torch.tensor(starts, dtype=torch.int32, device=device)
    context_lens = torch.tensor([c.context_len for c in chunks], dtype=torch.int32, device=device)
    longest = max((len(chunk.token_ids) for chunk in chunks), default=0)
    attention, slots = {}, {}
    for kind in LayerKind:
        tables = [list(chunk.pages[kind]) for chunk in chunks]
        width = max(map(len, tables), default=0)
        padded = [table + [0] * (width - len(table)) for table in tables]
        page_table = torch.tensor(padded, dtype=torch.int32, device=device).view(len(chunks), width)
        attention[kind] = AttentionBatch(query_start, context_lens, page_table, longest)
        slots[kind] = torch.tensor(
            [
                table[position // page_size] * page_size + position % page_size
                for table, span in zip(tables, positions, strict=True)
                for position in span
            ],
            dtype=torch.int64,
            device=device,
        )
    return ForwardBatch(
        token_ids=torch.tensor([t for c in chunks for t in c.token_ids], dtype=torch.int64, device=device),
        positions=torch.tensor([p for span in positions for p in span], dtype=torch.int64, device=device),
        attention=attention,
        slots=slots,
        logit_rows=torch.tensor(
            [r for end, chunk in zip(starts[1:], chunks, strict=True) for r in range(end - chunk.num_logits, end)],
            dtype=torch.int64,
            device=device,
        ),
    )
