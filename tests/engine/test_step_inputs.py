"""The tensors of a step: what is laid out, in any size, and padding that changes nothing, whatever memory holds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from msgspec import structs

from microscale.engine.ahead import Ahead, Layouts
from microscale.engine.config import EngineConfig
from microscale.engine.graph_sizes import decode_key, tail_key, verify_key
from microscale.engine.graphs import GraphCounts, holds
from microscale.engine.limits import SHORT_CONTEXT, Limits
from microscale.engine.page_tables import PageTables
from microscale.engine.pages import PagePool
from microscale.engine.request import Request
from microscale.engine.runner import ModelRunner
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.step_inputs import StepInputs
from microscale.engine.work import Work
from microscale.models.config import PAGED, LayerKind
from microscale.models.families import AnyModel
from microscale.models.recorded import Step
from microscale_lab.batches import SequenceChunk, build_batch
from support.forward import poison
from support.loading import load_model
from support.paper_graphs import enable, on_paper

CPU = torch.device("cpu")
PAGE = 4
GARBAGE = 2**62 + 12345
MAX_TOKENS, MAX_SEQUENCES, MAX_ROWS, MAX_PAGES = 120, 32, 40, 33
Pools = dict[LayerKind, PagePool]


def pools_of(pages: int) -> Pools:
    return {kind: PagePool(pages + place) for place, kind in enumerate(PAGED)}


def inputs_of(pools: Pools, max_pages: int = MAX_PAGES) -> StepInputs:
    return StepInputs(
        pools,
        PAGE,
        max_tokens=MAX_TOKENS,
        max_sequences=MAX_SEQUENCES,
        max_rows=MAX_ROWS,
        max_pages=max_pages,
        device=CPU,
    )


def make(pools: Pools, name: str, first: int, count: int = 1, drafts: int = 0, later: int = 0) -> Work:
    """``count`` tokens of a request from ``first`` on, and drafts after them. ``later``: tokens of its prompt that do
    not run in this step."""
    chooser = random.Random(name)
    request = Request(name, [chooser.randrange(90) for _ in range(first + count + later)], SamplingParams())
    for pool in pools.values():
        pool.grow(name, -(-(first + count + drafts) // PAGE))
    return Work(request, first, count + drafts, drafts=tuple(chooser.randrange(90) for _ in range(drafts)))


def random_schedule(chooser: random.Random, pools: Pools, name: str, kind: str) -> list[Work]:
    """Sequences that decode, with drafts, or with prompts, chunks of prompts and drafts among them."""
    schedule = []
    for row in range(chooser.randint(1, 7)):
        first, count, drafts, later = chooser.randrange(30), 1, 0, 0
        if kind != "decode":
            drafts = chooser.choice((0, 0, 1, 2, 5))
        if kind == "prompts" and chooser.random() < 0.6:
            count, drafts, later = chooser.randint(1, 12), 0, chooser.choice((0, 0, 3))
        schedule.append(make(pools, f"{name} {row}", first, count, drafts, later))
        if first > 12:
            pools[LayerKind.SLIDING].drop(schedule[-1].request.request_id, 2)
    return schedule


def random_key(chooser: random.Random, schedule: Sequence[Work], kind: str) -> Step:
    """Any size that holds the schedule."""
    counts = [work.count for work in schedule]
    pages = chooser.choice((12, MAX_PAGES))
    if kind == "decode":
        return decode_key(len(counts) + chooser.choice((0, 1, 9)), pages)
    if kind == "drafts":
        own = verify_key(counts, pages)
        larger = replace(own, tokens=own.tokens + chooser.choice((0, 3)), longest=8, sequences=MAX_SEQUENCES)
        return chooser.choice((own, larger))
    tokens = sum(counts) + chooser.choice((0, 1, 5, 40))
    return Step(tokens, len(counts) + chooser.choice((1, 4)), tokens, pages, rows=0)


def check_layout(inputs: StepInputs, pools: Pools, schedule: Sequence[Work], key: Step) -> None:
    """The tensors are those of a plain layout: sequence by sequence, then padding in the scratch page, then none."""
    batch = inputs.batch(key)
    counts = [work.count for work in schedule]
    spare = key.tokens - sum(counts)
    padding = [min(key.longest, spare - at) for at in range(0, spare, key.longest)]
    spans = [range(work.first, work.first + work.count) for work in schedule] + [range(count) for count in padding]
    tokens = [token for work in schedule for token in work.tokens]
    assert batch.token_ids.tolist() == tokens + [0] * spare
    assert batch.positions.tolist() == [position for span in spans for position in span]
    starts = [sum(map(len, spans[:row])) for row in range(len(spans) + 1)]
    empty = key.sequences - len(spans)
    for kind, pool in pools.items():
        attention = batch.attention[kind]
        assert attention.sizes == (key.sequences, key.longest, key.pages)
        assert attention.verify is key.verify
        assert attention.query_start.tolist() == starts + [key.tokens] * empty
        assert attention.context_lens.tolist() == [span.stop for span in spans] + [0] * empty
        held = [list(pool.pages_of(work.request.request_id)) for work in schedule]
        held += [[pool.num_pages] * -(-count // PAGE) for count in padding]
        slots = [
            pages[position // PAGE] * PAGE + position % PAGE
            for pages, span in zip(held, spans, strict=True)
            for position in span
        ]
        assert batch.slots[kind].tolist() == slots
        for row, pages in enumerate(held):
            shown = attention.page_table[row, : len(pages)].tolist()
            assert all(page in (-1, entry) for page, entry in zip(pages, shown, strict=True))
        if key.rows is not None:
            check_rows(inputs, schedule, starts, key, kind)


def check_rows(inputs: StepInputs, schedule: Sequence[Work], starts: Sequence[int], key: Step, kind: LayerKind) -> None:
    """The last tokens of sequences whose next token is due are queries of their own."""
    rows, lens, owners = [], [], []
    for row, work in enumerate(schedule):
        for back in reversed(range(work.num_logits)):
            rows.append(starts[row + 1] - 1 - back)
            lens.append(work.first + work.count - back)
            owners.append(row)
    assert inputs.logit_rows().tolist() == rows + [0] * (MAX_ROWS - len(rows))
    queries = inputs.tail_queries(len(rows), key.pages, kind)
    assert queries.sizes == (len(rows), 1, key.pages)
    assert queries.query_start.tolist() == list(range(len(rows) + 1))
    assert queries.context_lens.tolist() == lens
    assert torch.equal(queries.page_table, inputs.batch(key).attention[kind].page_table[owners])


@pytest.mark.parametrize("kind", ["decode", "drafts", "prompts"])
def test_a_step_is_laid_out_as_its_schedule_says(kind: str) -> None:
    """One step after another on the same tensors, over garbage: sequences change rows, grow, and lose pages."""
    chooser = random.Random(kind)
    pools = pools_of(400)
    inputs = inputs_of(pools)
    kept: list[Work] = []
    for step in range(60):
        schedule = [*kept, *random_schedule(chooser, pools, str(step), kind)][-8:]
        chooser.shuffle(schedule)
        key = random_key(chooser, schedule, kind)
        assert holds(key, [work.count for work in schedule], 1)
        inputs._staging.host.fill_(GARBAGE)
        inputs.fill(schedule, key)
        check_layout(inputs, pools, schedule, key)
        for work in schedule:  # some are preempted and come back with other pages, and some go
            request = work.request
            if chooser.random() < 0.3:
                for pool in pools.values():
                    pool.release(request.request_id)
                    pool.grow("between", 1)
                    pool.grow(request.request_id, -(-(work.first + work.count) // PAGE))
                    pool.release("between")
                request.num_preempted += 1
        kept = [work for work in schedule if chooser.random() < 0.5]
        for work in {id(w): w for w in schedule}.values():
            if work not in kept:
                for pool in pools.values():
                    pool.release(work.request.request_id)


def unread(schedule: Sequence[Work], accepted: Sequence[int]) -> tuple[list[Work], Ahead]:
    """The same schedule, launched before the host knew how many of five drafts the last step accepted."""
    ahead = [
        structs.replace(work, first=work.first - count, ahead=True, drafts=(0,) * len(work.drafts), slack=5)
        for work, count in zip(schedule, accepted, strict=True)
    ]
    layouts = Layouts(CPU)
    own = torch.tensor([work.request.tokens[-1] for work in schedule])
    layout, drafts = layouts.of([len(work.drafts) for work in schedule]), [work.drafts for work in schedule]
    counts = torch.tensor(accepted)
    return ahead, Ahead(own, counts, layouts.drafts(drafts), counts[layout.owners], layout)


@pytest.mark.parametrize("sequences", [1, 3, 20])
def test_the_device_works_out_what_the_host_lays_out_when_all_is_known(sequences: int) -> None:
    pools = pools_of(600)
    schedule = [make(pools, str(n), 5 + 3 * n, drafts=(3 + n) % 6) for n in range(sequences)]
    for work in schedule:
        for pool in pools.values():
            pool.grow(work.request.request_id, -(-(work.first + work.count + 5) // PAGE))
    ahead, moved = unread(schedule, [(2 + 3 * n) % 6 for n in range(sequences)])
    key = verify_key([work.count for work in schedule], MAX_PAGES)
    inputs = inputs_of(pools)
    inputs.fill(ahead, key, ahead=moved)
    check_layout(inputs, pools, schedule, key)


def test_tokens_may_be_on_the_device_alone() -> None:
    pools = pools_of(60)
    schedule = [make(pools, str(n), 3 + n) for n in range(3)]
    inputs, key = inputs_of(pools), decode_key(5, MAX_PAGES)
    tokens = torch.tensor([work.request.tokens[-1] for work in schedule], dtype=torch.int32)
    inputs.fill([structs.replace(work, ahead=True) for work in schedule], key, tokens)
    check_layout(inputs, pools, schedule, key)


@pytest.mark.parametrize("unread", [(0, 2), (1, 3), (0, 1)])
def test_tokens_on_the_device_come_between_those_of_prompts(unread: tuple[int, ...]) -> None:
    pools = pools_of(60)
    inputs = inputs_of(pools)
    schedule = [make(pools, str(row), 5 if row in unread else 2, 1 if row in unread else 4) for row in range(4)]
    key = Step(20, MAX_SEQUENCES, 20, MAX_PAGES, rows=0)
    tokens = torch.tensor([schedule[row].request.tokens[-1] for row in unread], dtype=torch.int32)
    hidden = [structs.replace(work, ahead=row in unread) for row, work in enumerate(schedule)]
    for _ in range(2):
        inputs.fill(hidden, key, tokens)
        check_layout(inputs, pools, schedule, key)


def test_every_tensor_begins_where_kernels_expect_it() -> None:
    inputs = inputs_of(pools_of(60))
    for tokens in range(1, 34):
        for sequences in (1, 2, 3, 8):
            batch = inputs.batch(Step(tokens, sequences, 8, MAX_PAGES))
            attention = [value for each in batch.attention.values() for value in vars(each).values()]
            tensors = [batch.token_ids, batch.positions, *batch.slots.values(), *attention]
            assert all(each.data_ptr() % 16 == 0 for each in tensors if isinstance(each, torch.Tensor))


def test_a_table_forgets_the_pages_of_rejected_drafts() -> None:
    """They go back, and another sequence has them. The row shows what its sequence has now."""
    pools: Pools = {kind: PagePool(16) for kind in PAGED}
    tables = PageTables(pools, PAGE, 3, 16, CPU)
    work = make(pools, "a", 3, drafts=6)  # pages 0 to 2; the first holds all that is not a draft
    for turn in range(4):
        for row in (0, 1) if turn else (0,):
            tables.show(row, work)
        tables.flush()
        for kind, pool in pools.items():
            pages = list(pool.pages_of("a"))
            assert tables.of(kind, 3, len(pages))[0].tolist() == pages
            pool.shrink("a", turn + 1)
            pool.grow(f"other {turn}", 2)
            pool.grow("a", turn + 4)
        work.request.tokens += [1] * PAGE
        work = structs.replace(work, first=work.first + PAGE)


# ---- the runner ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"])
def model(request: pytest.FixtureRequest) -> AnyModel:
    return load_model(EngineConfig(request.param, load_format="dummy", device="cpu", block_size=PAGE))


LIMITS = Limits(PAGE, window=6, max_num_seqs=20, max_num_batched_tokens=120, max_model_len=2 * SHORT_CONTEXT)


def started(model: AnyModel, pools: Pools, *, fill: bool = True, drafts: int = 0) -> ModelRunner:
    limits = replace(LIMITS, window=model.config.sliding_window)
    runner = ModelRunner(model, pools, limits, fill_up_prompts=fill, draft_tokens=drafts)
    poison(runner._kv)
    return runner


def plain_logits(model: AnyModel, runner: ModelRunner, pools: Pools, schedule: Sequence[Work]) -> torch.Tensor:
    """Of a step that is laid out by itself, on the runner's cache."""
    chunks = []
    for work in schedule:
        pages = {kind: pool.pages_of(work.request.request_id) for kind, pool in pools.items()}
        chunks.append(SequenceChunk(work.tokens, work.first, pages, work.num_logits))
    return model.forward(build_batch(chunks, PAGE, CPU), runner._kv).values


@pytest.mark.parametrize("kind", ["decode", "drafts", "prompts"])
def test_a_padded_step_gives_the_logits_of_a_plain_one(
    model: AnyModel, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any size, over KV pages that hold NaN where nothing was written; and the cache is the same."""
    chooser = random.Random(kind)
    for turn in range(4):
        pools = pools_of(300)
        padded, plain = (started(model, pools, drafts=5 if kind == "drafts" else 0) for _ in range(2))
        schedule = random_schedule(chooser, pools, str(turn), kind)
        for pool in pools.values():
            for work in schedule:
                pool.release(work.request.request_id)
                pool.grow(work.request.request_id, -(-(work.first + work.count) // PAGE))
        for runner in (padded, plain):  # what came before in each sequence
            for work in schedule:
                if work.first:
                    plain_logits(model, runner, pools, [structs.replace(work, first=0, count=work.first, drafts=())])
            runner._inputs._staging.host.fill_(GARBAGE)
        key = random_key(chooser, schedule, kind)
        monkeypatch.setattr(
            padded._graphs, "pick", lambda wanted, counts, key=key: key if wanted.rows in (None, 0) else wanted
        )
        logits, expected = padded.forward(schedule).values, plain_logits(model, plain, pools, schedule)
        assert logits.shape == expected.shape
        # Products of other numbers of rows add up in another order.
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(1), expected.argmax(1))
        for layer, ours, theirs in zip(model.layers, padded._kv.layers, plain._kv.layers, strict=True):
            count = pools[layer.kind].num_pages
            torch.testing.assert_close(ours.k[:count], theirs.k[:count], rtol=1e-4, atol=1e-4, equal_nan=True)
            torch.testing.assert_close(ours.v[:count], theirs.v[:count], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_a_chunk_that_gives_no_logits_and_a_step_that_no_bucket_holds(model: AnyModel) -> None:
    pools = pools_of(60)
    runner = started(model, pools)
    assert runner.forward([make(pools, "a", 0, 20, later=5)]).values.shape == (0, model.config.vocab_size)
    large = make(pools, "b", 0, 64)
    runner._sizes = replace(runner._sizes, buckets=[8, 32])
    expected = plain_logits(model, runner, pools, [large])
    torch.testing.assert_close(runner.forward([large]).values, expected, rtol=1e-4, atol=1e-4)


def test_padding_writes_to_the_scratch_page(model: AnyModel) -> None:
    """A table is wide enough for it, also where no request may be so long."""
    pools = pools_of(60)
    limits = replace(LIMITS, window=model.config.sliding_window, max_model_len=9)
    runner = ModelRunner(model, pools, limits, fill_up_prompts=True, draft_tokens=3)
    poison(runner._kv)
    for key in [*runner._sizes.first(), *runner._sizes.later()][::7]:
        if not key.rows:
            runner._run_padding(key)
    for layer, kv in zip(model.layers, runner._kv.layers, strict=True):
        held = pools[layer.kind].num_pages
        for each in (kv.k, kv.v):
            assert each[:held].isnan().all()
            assert each[held].isfinite().all()


def test_a_server_captures_before_it_is_ready_and_when_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps run in what there is; what was missed most is captured first."""
    model = load_model(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu", block_size=PAGE))
    on_paper(monkeypatch)
    pools = pools_of(300)
    limits = replace(LIMITS, window=model.config.sliding_window, max_num_batched_tokens=64, max_model_len=256)
    runner = ModelRunner(model, pools, limits, fill_up_prompts=True, draft_tokens=3)
    assert not runner.idle()  # there are no graphs on a CPU
    enable(runner._graphs)
    monkeypatch.setattr(runner, "_later", type(runner._later)(runner._sizes.later()))
    runner.prepare(stand_ins=True)
    first = len(runner._graphs)
    assert runner.graphs() == GraphCounts(first, 0, 0)
    assert first == len(runner._sizes.first())
    for step, rows in enumerate((9, 12, 12, 10, 12, 10)):
        runner.forward([make(pools, f"{step} {row}", 0) for row in range(rows)])
    assert runner.graphs() == GraphCounts(first, 0, 6)
    runner.forward([make(pools, "alone", 0, 35)])
    runner.forward([make(pools, f"company {row}", 0, 9) for row in range(3)])
    runner.forward([make(pools, f"drafts {row}", 3, drafts=row) for row in range(3)])
    captured, waited_for, stand_ins = runner.graphs()
    assert (captured, waited_for) == (first, 0)
    assert stand_ins >= 9
    # A capture computes nothing, whatever the inputs hold. On paper it would.
    monkeypatch.setattr(runner, "_work", lambda key: partial(int, 7))
    pages = runner._sizes.max_pages
    for rows in (12, 10):
        assert runner.idle()
        assert decode_key(rows, pages) in runner._graphs
    while runner.idle():
        pass
    assert {*runner._sizes.first(), *runner._sizes.later()} <= runner._graphs._graphs.keys()
    assert tail_key(3, pages) in runner._graphs
