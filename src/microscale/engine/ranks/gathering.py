"""From each rank's rows of lm_head to what rank 0 samples from.

Where every row of a step takes the likeliest token, a rank says three numbers a row: its largest logit, where that is,
and the sum of the others under it. Where a row is drawn, or wants more log-probabilities than its own token's, or is
changed before it is drawn (penalties, biases, grammars), all logits are gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from microscale.backends.ops import Logits
from microscale.backends.ranks import as_one_block, summarise
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.work import Work
from microscale.parallel.group import Group
from microscale.parallel.sharding import Shard, split_vocabulary


def takes_likeliest(schedule: Sequence[Work]) -> bool:
    """Whether blocks suffice for all that a step gives logits for."""
    return all(_is_plain(work.request.params) and not work.request.scoring for work in schedule if work.num_logits)


def _is_plain(params: SamplingParams) -> bool:
    changed = params.penalised or params.logit_bias or params.min_tokens or params.grammar is not None
    return params.temperature == 0 and params.logprobs is None and not changed


def gather(logits: Logits, vocab: int, group: Group, *, likeliest: bool) -> Logits:
    """On rank 0 what all ranks have: all logits, or one block of each rank beside its own. Others keep theirs."""
    if not len(logits.values):
        return logits
    shares = [split_vocabulary(vocab, Shard(rank, group.world)) for rank in range(group.world)]
    if not likeliest:
        whole = group.columns(logits.values, [len(share) for share in shares])
        return logits if whole is None else summarise(whole)
    largest, rows, total = as_one_block(logits)
    rows = rows.int() + shares[group.shard.rank].start
    told = group.columns(torch.stack((largest, rows.view(torch.float32), total), dim=1), [3] * group.world)
    if told is None:
        return logits
    return Logits(
        logits.values,
        told[:, 0::3].contiguous(),
        told[:, 1::3].contiguous().view(torch.int32),
        told[:, 2::3].contiguous(),
        len(shares[0]),
    )
