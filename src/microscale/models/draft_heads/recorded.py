"""Which kernels a draft head may start: its own ``draft`` on tensors without memory, at all sizes.

As ``models/recorded.py`` for models. The steps are those of its target: a head follows them, row for row.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from microscale.backends.ops import DenseWeights, Kernel, Launch, Ops, recording
from microscale.models.draft_heads.config import HeadConfig
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds, Verified
from microscale.models.draft_heads.heads import bind_head, dummy_head
from microscale.models.dummy_weights import META, ShapeTensors
from microscale.models.recorded import MAX_TOKENS, PAGE_SIZE, steps
from microscale.parallel.sharding import split_vocabulary

NUM_PAGES = 4
DRAFTS = 2
"""A chain's second step is as all after it; so are blocks of any size, which differ in rows alone."""


def bind_head_shapes(config: HeadConfig, ops: Ops, page_size: int = PAGE_SIZE) -> DraftHead:
    """The head on weights that are shapes alone. Where it takes the target's lm_head, that is bound in BF16."""
    hidden = config.reads.target_hidden
    table = torch.empty((config.reads.vocab_size, hidden), dtype=torch.bfloat16, device=META)
    rows = split_vocabulary(config.reads.vocab_size, config.shard)
    own = Ops(ops.gpu, ops.activations, ops.preference).dense("lm_head", DenseWeights(table[: len(rows)]))
    ends = TargetEnds(ops.embed(table), own)
    return bind_head(dummy_head(config, ShapeTensors()), ops, torch.device(META), page_size, ends)


def record_head(head: DraftHead, max_context: int, max_tokens: int = MAX_TOKENS) -> dict[Kernel, Launch]:
    """Every kernel that the bound head may start behind steps of its target of up to ``max_tokens`` tokens."""
    kv, reads = head.new_cache(NUM_PAGES), head.config.reads
    count = min(DRAFTS, head.most_drafts or DRAFTS)
    with recording() as found:
        for step in steps(max_context, head.page_size, max_tokens):
            rows = step.sequences if step.rows is None else step.rows
            batch = replace(step, rows=rows).batch()
            tapped = torch.empty((step.tokens, reads.width), dtype=head.ops.dtype, device=META)
            head.draft(Verified(batch, tapped), kv, count)
    return found
