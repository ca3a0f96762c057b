"""Standing inputs of decoding steps: sizes, what is copied, rows that change hands."""

from __future__ import annotations

import torch

from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.step.decode import DecodeInputs, GraphKey
from microscale.engine.step.pages import PagePool
from microscale.engine.step.work import Work
from microscale.models.config import LayerKind
from microscale.models.recorded import SHORT_CONTEXT

CPU = torch.device("cpu")


def make(pools: dict[LayerKind, PagePool], name: str, length: int) -> Work:
    request = Request(name, list(range(length)), SamplingParams())
    for pool in pools.values():
        pool.grow(name, -(-length // 4))
    return Work(request, length - 1, 1)


def check(inputs: DecodeInputs, pools: dict[LayerKind, PagePool], schedule: list[Work], size: int) -> None:
    """The tensors say what the schedule and the pools say."""
    inputs.fill(schedule, size)
    batch = inputs.batch(GraphKey(size, inputs.key(schedule).pages))
    for row, work in enumerate(schedule):
        assert batch.token_ids[row] == work.request.tokens[work.first]
        assert batch.positions[row] == work.first
        for kind, pool in pools.items():
            pages = list(pool.pages_of(work.request.request_id))
            assert batch.attention[kind].page_table[row, : len(pages)].tolist() == pages
            assert batch.attention[kind].context_lens[row] == work.first + 1
            assert batch.slots[kind][row] == pages[work.first // 4] * 4 + work.first % 4
    for row in range(len(schedule), size):
        for kind, pool in pools.items():
            assert batch.attention[kind].context_lens[row] == 1
            assert batch.attention[kind].page_table[row, 0] == pool.num_pages
            assert batch.slots[kind][row] // 4 == pool.num_pages


def test_rows_follow_the_plan() -> None:
    pools = {kind: PagePool(32) for kind in LayerKind}
    inputs = DecodeInputs(pools, 4, max_rows=6, max_pages=16, device=CPU)
    a, b, c = make(pools, "a", 5), make(pools, "b", 9), make(pools, "c", 1)
    check(inputs, pools, [a, b, c], 3)
    check(inputs, pools, [b, c], 4)  # others move up, and rows of no one follow
    check(inputs, pools, [b, a, c], 5)
    for pool in pools.values():
        pool.grow("b", 4)
    check(inputs, pools, [b, a, c], 3)


def test_short_sequences_have_a_narrow_table() -> None:
    """Whatever the lengths, one of two widths, which holds all of them; one tensor behind both."""
    longest = SHORT_CONTEXT + 5
    pools = {kind: PagePool(1024) for kind in LayerKind}
    inputs = DecodeInputs(pools, 4, max_rows=2, max_pages=-(-longest // 4), device=CPU)
    lengths = (1, SHORT_CONTEXT, SHORT_CONTEXT + 1, longest)
    works = [make(pools, str(length), length) for length in lengths[:1] + lengths[3:]]
    check(inputs, pools, works, 2)
    widths = [inputs.key([Work(works[0].request, length - 1, 1)]).pages for length in lengths]
    assert widths == [SHORT_CONTEXT // 4] * 2 + [-(-longest // 4)] * 2
    assert inputs.key(works).pages == -(-longest // 4)
    narrow, wide = (inputs.batch(GraphKey(2, width)).attention[LayerKind.FULL].page_table for width in widths[1:3])
    assert narrow.shape == (2, SHORT_CONTEXT // 4)
    assert narrow.data_ptr() == wide.data_ptr()
    small = DecodeInputs(pools, 4, max_rows=2, max_pages=8, device=CPU)
    assert {small.key([Work(works[0].request, length - 1, 1)]).pages for length in (1, 8, 32)} == {8}


def test_a_preempted_request_comes_back_with_other_pages() -> None:
    pools = {kind: PagePool(8) for kind in LayerKind}
    inputs = DecodeInputs(pools, 4, max_rows=2, max_pages=8, device=CPU)
    work = make(pools, "a", 9)
    check(inputs, pools, [work], 1)
    for pool in pools.values():
        pool.release("a")
        pool.grow("other", 2)
        pool.grow("a", 3)
    work.request.num_preempted += 1
    check(inputs, pools, [work], 1)
