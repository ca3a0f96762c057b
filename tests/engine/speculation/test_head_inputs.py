"""What a draft head gets of a step: rows, lengths and pages, from tokens that only the device knows."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from microscale.engine.ahead import Ahead, Layouts
from microscale.engine.limits import Limits
from microscale.engine.pages import PagePool
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.drafter import DraftTarget, LaunchedStep
from microscale.engine.speculation.head_inputs import FULL, HeadInputs
from microscale.engine.work import Work
from microscale.models.config import PAGED
from microscale.models.taps import Taps

CPU = torch.device("cpu")
SIZE, PAGES, MOST = 4, 40, 3
VOCAB = 200
NOBODY = PAGES * SIZE


def request(name: str, length: int) -> Request:
    return Request(name, range(100, 100 + length), SamplingParams(max_tokens=20))


@pytest.fixture
def step() -> tuple[HeadInputs, LaunchedStep, dict[str, list[int]]]:
    """Four sequences decode, one with a prompt that ends, one goes on; and one is only scored."""
    pools = {kind: PagePool(PAGES) for kind in PAGED}
    limits = Limits(SIZE, 8, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    taps = Taps.empty((1,), 64, 8, torch.float32, CPU)
    inputs = HeadInputs(DraftTarget(pools, limits, taps), MOST, VOCAB, CPU)
    schedule = [
        Work(request("two of three", 6), 5, 4, drafts=(7, 8, 9)),
        Work(request("goes on", 30), 4, 5),
        Work(request("none of two", 8), 7, 3, drafts=(7, 8)),
        Work(request("ends", 7), 3, 4),
        Work(request("scored", 6), 4, 2),
        Work(request("undrafted", 9), 8, 1),
        Work(request("all", 4), 3, 3, drafts=(5, 6)),
    ]
    pages = {}
    for work in reversed(schedule):
        name = work.request.request_id
        pools[FULL].grow(name, -(-(work.first + work.count) // SIZE))
        pages[name] = list(pools[FULL].pages_of(name))
    drawn = torch.tensor([7, 8, 1, 50, 2, 8, 3, 2**31 - 1, 6, 5, 6, 9], dtype=torch.int32)
    firsts = {"two of three": 0, "none of two": 4, "ends": 7, "undrafted": 8, "all": 9}
    return inputs, LaunchedStep(schedule, drawn, firsts), pages


def slot(pages: list[int], position: int) -> int:
    return pages[position // SIZE] * SIZE + position % SIZE


@pytest.mark.parametrize("padded", [False, True])
def test_rows_are_kept_as_far_as_drafts_were_accepted(
    step: tuple[HeadInputs, LaunchedStep, dict[str, list[int]]], padded: bool
) -> None:
    inputs, launched, pages = step
    key = inputs.key(launched, 2, padded=padded)
    inputs.fill(launched, key)
    batch = inputs.verified(key).batch
    assert (key.tokens, key.sequences) == ((32, 8) if padded else (22, 5))
    kept = {"two of three": 3, "goes on": 5, "none of two": 1, "ends": 4, "scored": 1, "undrafted": 1, "all": 3}
    nexts = {
        "two of three": [7, 8, 1],
        "goes on": list(range(105, 110)),
        "none of two": [2],
        "ends": [104, 105, 106, VOCAB - 1],  # no token was drawn
        "scored": [105],
        "undrafted": [6],
        "all": [5, 6, 9],
    }
    row = 0
    for work in launched.schedule:
        name = work.request.request_id
        span = range(work.first, work.first + work.count)
        certain = kept[name]
        slots = batch.slots[FULL][row : row + work.count].tolist()
        assert batch.positions[row : row + work.count].tolist() == list(span)
        assert slots[:certain] == [slot(pages[name], at) for at in span[:certain]]
        assert slots[certain:] == [NOBODY] * (work.count - certain)
        assert batch.token_ids[row : row + certain].tolist() == nexts[name]
        row += work.count
    assert batch.slots[FULL][row:].tolist() == [NOBODY] * (key.tokens - row)
    assert batch.logits is not None
    assert batch.logits.rows[:5].tolist() == [2, 9, 15, 18, 21]
    assert batch.logits.attention[FULL].context_lens[:5].tolist() == [8, 8, 7, 9, 6]


@pytest.mark.parametrize("padded", [False, True])
def test_guesses_go_on_in_own_pages_then_in_pages_that_no_other_sequence_has(
    step: tuple[HeadInputs, LaunchedStep, dict[str, list[int]]], padded: bool
) -> None:
    inputs, launched, pages = step
    key = inputs.key(launched, MOST, padded=padded)
    inputs.fill(launched, key)
    batch = inputs.verified(key).batch
    assert batch.logits is not None
    queries = batch.logits.attention[FULL]
    beyond: list[int] = []
    for table, name, length in zip(
        queries.page_table.tolist(), launched.first_rows, queries.context_lens.tolist(), strict=False
    ):
        held = pages[name]
        assert table[: len(held)] == held
        reached = -(-(length + MOST + 1) // SIZE)
        beyond += table[len(held) : reached]
    assert beyond
    assert len(set(beyond)) == len(beyond)
    assert min(beyond) > PAGES
    assert max(beyond) < inputs.num_pages


def test_without_guesses_rows_are_kept_all_the_same(
    step: tuple[HeadInputs, LaunchedStep, dict[str, list[int]]],
) -> None:
    inputs, launched, _ = step
    found = []
    for count in (0, 2):
        key = inputs.key(launched, count, padded=False)
        inputs.fill(launched, key)
        batch = inputs.verified(key).batch
        assert batch.logits is not None
        assert batch.logits.rows.shape[0] == (5 if count else 0)
        found.append((batch.slots[FULL].tolist(), batch.token_ids.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_the_device_finds_what_the_host_lays_out_when_all_is_known(padded: bool, count: int) -> None:
    """Of a step that was launched before the one before it was read."""
    pools = {kind: PagePool(PAGES) for kind in PAGED}
    limits = Limits(SIZE, 8, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    known = [
        Work(request("two of three", 6), 5, 4, drafts=(7, 8, 9)),
        Work(request("undrafted", 9), 8, 1),
        Work(request("all", 4), 3, 3, drafts=(5, 6)),
    ]
    for work in known:
        for pool in pools.values():
            pool.grow(work.request.request_id, -(-(work.first + work.count + 3) // SIZE))
    accepted, layouts = [2, 0, 3], Layouts(CPU)
    layout, drafts = layouts.of([len(work.drafts) for work in known]), layouts.drafts([work.drafts for work in known])
    counts = torch.tensor(accepted)
    ahead = Ahead(torch.zeros(3, dtype=torch.int64), counts, drafts, counts[layout.owners], layout)
    unread = [
        replace(work, first=work.first - moved, ahead=True, drafts=(0,) * len(work.drafts), slack=3)
        for work, moved in zip(known, accepted, strict=True)
    ]
    drawn = torch.tensor([7, 8, 1, 50, 6, 5, 6, 9], dtype=torch.int32)
    firsts = {"two of three": 0, "undrafted": 4, "all": 5}
    found = []
    for step in (LaunchedStep(known, drawn, firsts), LaunchedStep(unread, drawn, firsts, ahead)):
        inputs = HeadInputs(DraftTarget(pools, limits, Taps.empty((1,), 64, 8, torch.float32, CPU)), MOST, VOCAB, CPU)
        key = inputs.key(step, count, padded=padded)
        inputs.fill(step, key)
        batch = inputs.verified(key).batch
        assert batch.logits is not None
        queries = batch.logits.attention[FULL]
        tensors = (batch.token_ids, batch.positions, batch.slots[FULL], batch.logits.rows, queries.context_lens)
        found.append([each.tolist() for each in (*tensors, queries.page_table)])
    assert found[0] == found[1]
    assert NOBODY in found[0][2]


def test_a_step_of_nobody_touches_nobodys_page() -> None:
    pools = {kind: PagePool(PAGES) for kind in PAGED}
    limits = Limits(SIZE, 8, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    inputs = HeadInputs(DraftTarget(pools, limits, Taps.empty((1,), 64, 8, torch.float32, CPU)), MOST, VOCAB, CPU)
    key = inputs.sized(8, 2, MOST)
    inputs.fill(LaunchedStep(()), key)
    batch = inputs.verified(key).batch
    assert batch.logits is not None
    assert batch.slots[FULL].tolist() == [NOBODY] * 8
    assert batch.logits.attention[FULL].page_table[:, :3].min() >= PAGES
