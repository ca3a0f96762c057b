"""What a draft head computes with torch between kernels has, on tensors without memory, the shape that it has with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from microscale import hardware
from microscale.models.batch import ForwardBatch, LogitRows
from microscale.models.draft_heads.config import PRESETS, Eagle3Config, Llama3Rope, SeparateHeadConfig, head_rope_table
from microscale.models.draft_heads.dflash import DFlash
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds, Verified, likeliest_of_ranks
from microscale.models.draft_heads.eagle3 import Eagle3, target_ids
from microscale.models.draft_heads.heads import bind_head
from microscale.models.draft_heads.layer import FULL, Steps, count_up, following, join, slots_of
from microscale.models.draft_heads.weights import DummyHead
from microscale.models.dummy_weights import RandomTensors, ShapeTensors
from microscale.parallel.sharding import Shard
from microscale.planning.ops import Activations, AttentionBatch, DenseWeights, Logits, Ops, Preference
from microscale.planning.ranks import NoSums

CPU, META = torch.device("cpu"), torch.device("meta")
PAGE = 16
TINY = PRESETS["dflash-tiny"]
EAGLE3 = Eagle3Config(
    replace(TINY.layer, head_norms=False),
    TINY.reads,
    draft_vocab_size=96,
    maps_vocabulary=True,
    norm_before_fc=False,
    norm_of_each_tap=True,
    norm_before_residual=False,
    norm_output=False,
    own_embedding=False,
    own_lm_head=True,
)
Made = Tensor | tuple[Tensor, ...]


def sequences(number: int, pages: int, device: torch.device) -> AttentionBatch:
    starts = torch.zeros(number + 1, dtype=torch.int32, device=device)
    lens = torch.zeros(number, dtype=torch.int32, device=device)
    return AttentionBatch(starts, lens, torch.zeros((number, pages), dtype=torch.int32, device=device), 1)


def tokens(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=device)


def verified(rows: int, number: int, device: torch.device, last: bool = True) -> Verified:
    """So many rows, of which the last ones of so many sequences are drafted for."""
    queries = {FULL: sequences(number, 3, device)}
    wanted = LogitRows(tokens(number, device=device), queries) if last else None
    batch = ForwardBatch(tokens(rows, device=device), tokens(rows, device=device), queries, {}, wanted)
    return Verified(batch, torch.zeros((rows, TINY.reads.width), device=device))


def bound(config: SeparateHeadConfig, device: torch.device) -> DraftHead:
    ops, target = (Ops(hardware.cpu(), Activations.FLOAT32, Preference()) for _ in range(2))
    table = torch.zeros((config.reads.vocab_size, config.reads.target_hidden), dtype=torch.bfloat16, device=device)
    ends = TargetEnds(target.embed(table), target.dense("lm_head", DenseWeights(table)))
    weights = DummyHead(config, RandomTensors() if device == CPU else ShapeTensors())
    return bind_head(weights, ops, device, PAGE, ends)


def laid_out(number: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """The last of the steps."""
    batch = Steps(sequences(number, 3, device), count, PAGE).batch(count - 1, tokens(number, device=device))
    queries = batch.attention[FULL]
    return batch.positions, batch.slots[FULL], queries.query_start, queries.context_lens, queries.page_table


def block(number: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    head = bound(TINY, device)
    assert isinstance(head, DFlash)
    of_block, made = head._block(verified(9, number, device), count)
    queries = made.queries
    return of_block, made.positions, made.slots, queries.query_start, queries.context_lens, queries.page_table


def combined(device: torch.device) -> Tensor:
    head = bound(EAGLE3, device)
    assert isinstance(head, Eagle3)
    return head.combine(torch.zeros((5, EAGLE3.reads.width), device=device))


def built(device: torch.device) -> tuple[Tensor, ...]:
    head = bound(EAGLE3, device)
    assert isinstance(head, Eagle3)
    assert head.target_ids is not None
    return head.norms, head.target_ids


def chosen(device: torch.device) -> Tensor:
    numbers = torch.zeros((3, 4), device=device)
    logits = Logits(torch.zeros((3, 256), device=device), numbers, numbers.int(), numbers, 64)
    return likeliest_of_ranks(logits, replace(TINY, shard=Shard(1, 2)), NoSums(2))


CASES: dict[str, Callable[[torch.device], Made]] = {
    "count_up": lambda device: (count_up(7, device), count_up(0, device), count_up(5, device, torch.int32)),
    "join rows": lambda device: join(torch.zeros((2, 5), device=device), torch.zeros((3, 5), device=device)),
    "join none": lambda device: join(tokens(4, device=device), tokens(0, device=device)),
    "join columns": lambda device: join(torch.zeros((2, 5), device=device), torch.zeros((2, 3), device=device), dim=1),
    "following": lambda device: following(sequences(3, 2, device), 4),
    "following by none": lambda device: following(sequences(3, 2, device), 0),
    "slots": lambda device: slots_of(sequences(3, 2, device).page_table, tokens(3, 4, device=device), PAGE),
    "steps": lambda device: laid_out(3, 4, device),
    "steps of one": lambda device: laid_out(1, 1, device),
    "block": lambda device: block(3, 4, device),
    "block of one": lambda device: block(1, 2, device),
    "no block": lambda device: block(3, 0, device),
    "all rows are last": lambda device: verified(5, 5, device, last=False).last.rows,
    "ids": lambda device: target_ids(tokens(96, device=device)),
    "combine": combined,
    "norms and ids": built,
    "likeliest of ranks": chosen,
    "rope": lambda device: head_rope_table(Llama3Rope(5e5, 8.0, 1.0, 4.0, 8192), 64, device).inverse_frequencies,
}


def described(made: Made) -> list[tuple[object, ...]]:
    each = made if isinstance(made, tuple) else (made,)
    return [(x.dtype, x.shape, x.stride(), x.storage_offset()) for x in each]


@pytest.mark.parametrize("name", CASES)
def test_without_memory_it_is_the_same_shape(name: str) -> None:
    shape = CASES[name](META)
    assert all(each.is_meta for each in (shape if isinstance(shape, tuple) else (shape,)))
    assert described(shape) == described(CASES[name](CPU))
