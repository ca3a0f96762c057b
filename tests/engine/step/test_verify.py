"""Standing inputs of steps with drafts: what is laid out, padding that nobody notices, and tables after a rejection."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from microscale.engine.config import EngineConfig
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.step.ahead import Ahead, Layouts
from microscale.engine.step.decode import DecodeInputs
from microscale.engine.step.inputs import build_batch
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import PagePool
from microscale.engine.step.runner import ModelRunner
from microscale.engine.step.tables import PageTables
from microscale.engine.step.verify import VerifyInputs, VerifyKey, spare_rows
from microscale.engine.step.work import Work
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from microscale.models.recorded import SHORT_CONTEXT
from support.forward import poison
from support.loading import load_model
from support.paper_graphs import enable, on_paper

CPU = torch.device("cpu")
PAGE = 4
GARBAGE = 2**62 + 12345


def pools_of(pages: int) -> dict[LayerKind, PagePool]:
    return {kind: PagePool(pages + place) for place, kind in enumerate(LayerKind)}


def make(pools: dict[LayerKind, PagePool], name: str, first: int, drafts: int) -> Work:
    """A request whose token at ``first`` is its last, with drafts after it."""
    chooser = random.Random(name)
    request = Request(name, [chooser.randrange(90) for _ in range(first + 1)], SamplingParams())
    for pool in pools.values():
        pool.grow(name, -(-(first + 1 + drafts) // PAGE))
    return Work(request, first, 1 + drafts, drafts=tuple(chooser.randrange(90) for _ in range(drafts)))


def inputs_for(pools: dict[LayerKind, PagePool], sequences: int, drafts: int, max_pages: int = 64) -> VerifyInputs:
    decode = DecodeInputs(pools, PAGE, sequences, max_pages, CPU, spare_rows(sequences))
    return VerifyInputs(pools, decode.tables, sequences * (1 + drafts), CPU)


def test_the_tensors_say_what_the_schedule_says() -> None:
    pools = pools_of(60)
    inputs = inputs_for(pools, 6, 4)
    schedule = [make(pools, "a", 10, 3), make(pools, "b", 7, 0), make(pools, "c", 0, 2)]
    pools[LayerKind.SLIDING].drop("a", 2)
    key = inputs.key(schedule)
    assert key == VerifyKey(rows=4, tokens=8, longest=4, pages=64)
    inputs._host.fill_(GARBAGE)
    inputs._there.fill_(GARBAGE)
    inputs.fill(schedule, key)
    batch = inputs.batch(key)
    assert batch.token_ids.tolist() == [token for work in schedule for token in work.tokens]
    assert batch.positions.tolist() == [10, 11, 12, 13, 7, 0, 1, 2]
    assert batch.logits is None
    for kind, pool in pools.items():
        attention = batch.attention[kind]
        assert attention.verify
        assert attention.sizes == (4, 4, 64)
        assert attention.query_start.tolist() == [0, 4, 5, 8, 8]
        assert attention.context_lens.tolist() == [14, 8, 3, 0]
        for row, work in enumerate(schedule):
            pages = pool.pages_of(work.request.request_id)
            held = attention.page_table[row, : len(pages)].tolist()
            assert [page for page in held if page] == [page for page in pages if page > 0]
            start = int(attention.query_start[row])
            places = range(work.first, work.first + work.count)
            assert batch.slots[kind].tolist()[start : start + work.count] == [
                pages[place // PAGE] * PAGE + place % PAGE for place in places
            ]


def unread(schedule: list[Work], accepted: list[int]) -> tuple[list[Work], Ahead]:
    """The same schedule as one that was launched when nobody knew how many of five drafts the step before accepted."""
    each = zip(schedule, accepted, strict=True)
    found = [
        replace(work, first=work.first - count, ahead=True, drafts=(0,) * len(work.drafts), slack=5)
        for work, count in each
    ]
    layouts = Layouts(CPU)
    own = torch.tensor([work.request.tokens[-1] for work in schedule])
    layout, drafts = layouts.of([len(work.drafts) for work in schedule]), [work.drafts for work in schedule]
    counts = torch.tensor(accepted)
    return found, Ahead(own, counts, layouts.drafts(drafts), counts[layout.owners], layout)


@pytest.mark.parametrize("sequences", [1, 3, 20])
def test_the_device_finds_what_the_host_lays_out_when_all_is_known(sequences: int) -> None:
    """A context of one page or many, drafts that begin a page, and from 65 tokens on nobody's behind them."""
    pools = pools_of(600)
    schedule = [make(pools, str(n), 5 + 7 * n, (3 + n) % 8) for n in range(sequences)]
    for work in schedule:
        for pool in pools.values():
            pool.grow(work.request.request_id, -(-(work.first + work.count + 5) // PAGE))
    accepted = [(2 + 3 * n) % 6 for n in range(sequences)]
    tensors = []
    for works, ahead in ((schedule, None), unread(schedule, accepted)):
        inputs = inputs_for(pools, sequences, 7)
        inputs._there.fill_(GARBAGE)
        key = inputs.key(schedule)
        inputs.fill(works, key, ahead)
        batch = inputs.batch(key)
        attention = batch.attention[LayerKind.FULL]
        found = [batch.token_ids, batch.positions, attention.query_start, attention.context_lens]
        tensors.append([each.tolist() for each in (*found, *(batch.slots[kind] for kind in LayerKind))])
    assert tensors[0] == tensors[1]


def test_a_step_ahead_has_a_table_for_the_case_that_all_drafts_are_accepted() -> None:
    pools = pools_of(600)
    inputs = inputs_for(pools, 1, 7, max_pages=1000)
    work = make(pools, "a", SHORT_CONTEXT - 3, 0)
    assert inputs.key([work]).pages == SHORT_CONTEXT // PAGE
    assert inputs.key([replace(work, slack=3)]).pages == 1000


def test_many_tokens_are_filled_up_with_nobodys() -> None:
    pools = pools_of(600)
    inputs = inputs_for(pools, 20, 7)
    schedule = [make(pools, str(n), 5 + n, n % 8) for n in range(20)]
    count = sum(work.count for work in schedule)
    key = inputs.key(schedule)
    assert count == 82
    assert key == VerifyKey(rows=23, tokens=84, longest=8, pages=64)  # all the rows there are: 20, a sixteenth, two
    inputs.fill(schedule, key)
    batch = inputs.batch(key)
    assert batch.token_ids[count:].tolist() == [0, 0]
    for kind, pool in pools.items():
        attention = batch.attention[kind]
        assert attention.query_start[19:].tolist() == [78, 82, 84, 84, 84]
        assert attention.context_lens[20:].tolist() == [2, 0, 0]
        assert attention.page_table[20, 0] == pool.num_pages
        assert batch.slots[kind][count:].tolist() == [pool.num_pages * PAGE, pool.num_pages * PAGE + 1]


@pytest.mark.parametrize("sequences", [1, 2, 5, 17, 64, 100])
def test_there_are_rows_for_every_step(sequences: int) -> None:
    """Whatever the drafts of up to 15 tokens are, padding included."""
    chooser = random.Random(sequences)
    pools = pools_of(4 * sequences * 8)
    inputs = inputs_for(pools, sequences, 15)
    for turn in range(30):
        most = chooser.randint(1, 15)
        schedule = [
            make(pools, f"{turn} {n}", chooser.randrange(8), most if not n else chooser.randint(0, most))
            for n in range(chooser.randint(1, sequences))
        ]
        key = inputs.key(schedule)
        inputs.fill(schedule, key)
        assert key.rows <= inputs._tables.num_rows
        assert int(inputs.batch(key).attention[LayerKind.FULL].query_start[-1]) == key.tokens
        for pool in pools.values():
            for work in schedule:
                pool.release(work.request.request_id)


@pytest.mark.parametrize("max_pages", [64, 65])
def test_every_tensor_begins_where_kernels_expect_it(max_pages: int) -> None:
    inputs = inputs_for(pools_of(60), 8, 7, max_pages=max_pages)
    for tokens in range(2, 33):
        for rows in (1, 2, 3, 8):
            batch = inputs.batch(VerifyKey(rows, tokens, 8, max_pages))
            attention = [value for each in batch.attention.values() for value in vars(each).values()]
            held = [batch.token_ids, batch.positions, *batch.slots.values(), *attention]
            assert all(each.data_ptr() % 16 == 0 for each in held if isinstance(each, torch.Tensor))


def test_a_table_forgets_the_pages_of_rejected_drafts() -> None:
    """They go back, and others have them. The row shows what the sequence has now, also after it stood elsewhere."""
    pools = {kind: PagePool(16) for kind in LayerKind}
    tables = PageTables(pools, PAGE, 3, 16, CPU)
    work = make(pools, "a", 3, 6)  # pages 0 to 2; the first holds all that is not a draft

    def shown(row: int, work: Work) -> list[int]:
        for kind in LayerKind:
            tables.show(kind, row, work)
        tables.flush()
        return [int(tables.of(kind, 3, 16)[row, 1]) for kind in LayerKind]

    def held(index: int) -> list[int]:
        return [pool.pages_of("a")[index] for pool in pools.values()]

    assert shown(0, work) == held(1)
    for pool in pools.values():
        pool.shrink("a", 1)
        pool.grow("other", 2)
        pool.grow("a", 2)
    work.request.tokens.append(1)
    later = Work(work.request, 4, 1)
    assert shown(0, later) == held(1) == [3, 3]
    # It moves to another row, its drafts are rejected there, and it comes back.
    later = Work(work.request, 4, 5, drafts=(1, 2, 3, 4))
    for pool in pools.values():
        pool.grow("a", 3)
    tables.show(LayerKind.FULL, 0, later)
    tables.show(LayerKind.FULL, 1, later)
    tables.flush()
    pools[LayerKind.FULL].shrink("a", 2)
    pools[LayerKind.FULL].grow("third", 2)
    pools[LayerKind.FULL].grow("a", 3)
    work.request.tokens += [1] * 4
    tables.show(LayerKind.FULL, 1, Work(work.request, 8, 1))
    tables.show(LayerKind.FULL, 0, Work(work.request, 9, 1))
    tables.flush()
    pages = list(pools[LayerKind.FULL].pages_of("a"))
    assert tables.of(LayerKind.FULL, 3, 3)[0].tolist() == pages
    assert tables.of(LayerKind.FULL, 3, 3)[1].tolist() == pages


@pytest.fixture(scope="module", params=["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"])
def model(request: pytest.FixtureRequest) -> AnyModel:
    return load_model(EngineConfig(request.param, load_format="dummy", device="cpu", block_size=PAGE))


def test_padding_and_company_change_no_logits(model: AnyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of each token are those of a plain step, over pages that hold NaN where nobody has written."""
    monkeypatch.setattr("microscale.engine.step.verify.graph_size", lambda tokens: tokens + 5)
    pools = pools_of(120)
    limits = Limits(PAGE, model.config.sliding_window, 5, 64, 256)
    drafted, plain = (ModelRunner(model, pools, limits, draft_tokens=tokens) for tokens in (7, 0))
    schedule = [
        make(pools, str(n), first, drafts) for n, (first, drafts) in enumerate(((9, 4), (5, 0), (14, 7), (1, 1)))
    ]
    for runner in (drafted, plain):
        poison(runner._kv)
        for work in schedule:  # what came before in each sequence
            runner._forward(build_batch([runner._chunk(Work(work.request, 0, work.first))], PAGE, CPU))
    logits = drafted.forward(schedule).values
    chunks = [plain._chunk(work) for work in schedule]
    expected = plain._forward(build_batch(chunks, PAGE, CPU)).values
    assert logits.shape == expected.shape == (sum(work.count for work in schedule), model.config.vocab_size)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits.argmax(1), expected.argmax(1))


def test_steps_of_nobody_touch_nobodys_pages(model: AnyModel) -> None:
    pools = pools_of(60)
    limits = Limits(PAGE, model.config.sliding_window, 5, 64, 256)
    runner = ModelRunner(model, pools, limits, draft_tokens=7)
    poison(runner._kv)
    assert runner._verify is not None
    for sequences, tokens in ((1, 2), (1, 8), (3, 6)):
        runner._run_nobody(runner._verify.even_key(sequences, tokens, runner._order.max_pages))
    for layer, kv in zip(model.layers, runner._kv.layers, strict=True):
        held = pools[layer.kind].num_pages
        for each in (kv.k, kv.v):
            assert each[:held].isnan().all()
            assert each[held].isfinite().all()


def test_graphs_of_drafts_are_captured_when_there_is_time(model: AnyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start drafts of every length for one user; later the longest for several."""
    limits = Limits(PAGE, model.config.sliding_window, 3, 64, 256)
    runner = ModelRunner(model, pools_of(60), limits, draft_tokens=3)
    ran: list[object] = []
    monkeypatch.setattr(runner, "_run_nobody", ran.append)
    on_paper(monkeypatch)
    enable(runner._graphs)
    runner.prepare()
    first = [key for key in ran if isinstance(key, VerifyKey)]
    # The first of them runs as it is, and is then captured.
    assert [(key.rows, key.tokens, key.longest) for key in first] == [(1, 2, 2), (1, 2, 2), (1, 3, 4), (1, 4, 4)]
    later = {key for key in runner._later if isinstance(key, VerifyKey)}
    while runner.idle():
        pass
    assert later <= runner._graphs._graphs.keys()
    assert {(key.rows, key.tokens, key.longest) for key in later} == {(2, 8, 4), (4, 12, 4)}
