"""Steps with prompts from standing inputs: what is laid out, and padding that nobody notices, whatever it holds."""

from __future__ import annotations

import random
from itertools import takewhile

import pytest
import torch

from microscale.engine.config import EngineConfig
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.step import runner as runner_file
from microscale.engine.step.decode import GraphKey
from microscale.engine.step.graphs import GraphCounts, after_layers, whole
from microscale.engine.step.inputs import build_batch
from microscale.engine.step.limits import Limits
from microscale.engine.step.pages import PagePool
from microscale.engine.step.prompt import PromptInputs, PromptKey, TailKey
from microscale.engine.step.runner import ModelRunner
from microscale.engine.step.stand_ins import Key
from microscale.engine.step.work import Work
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from microscale.models.recorded import SHORT_CONTEXT
from support.forward import poison
from support.loading import load_model
from support.paper_graphs import enable, on_paper

CPU = torch.device("cpu")
PAGE = 4
LIMITS = Limits(PAGE, window=6, max_num_seqs=5, max_num_batched_tokens=64, max_model_len=256)
GARBAGE = 2**62 + 12345


def pools_of(pages: int) -> dict[LayerKind, PagePool]:
    return {kind: PagePool(pages + place) for place, kind in enumerate(LayerKind)}


def make(pools: dict[LayerKind, PagePool], name: str, first: int, count: int, later: int = 0) -> Work:
    """``count`` tokens from ``first`` on, of a request that has ``later`` more."""
    chooser = random.Random(name)
    request = Request(name, [chooser.randrange(90) for _ in range(first + count + later)], SamplingParams())
    for pool in pools.values():
        pool.grow(name, -(-(first + count) // PAGE))
    return Work(request, first, count)


def mixed(pools: dict[LayerKind, PagePool], tokens: int) -> list[Work]:
    """So many tokens: one sequence that decodes, the rest of a prompt, the midst of one, and a whole one."""
    parts = [1, *([1] if tokens > 1 else []), *([(tokens - 2) // 3] if tokens > 4 else [])]
    parts += [tokens - sum(parts)] if tokens > sum(parts) else []
    firsts, laters = (9, 5, 14, 0), (0, 0, 3, 0)
    rows = zip(parts, firsts, laters, strict=False)
    return [make(pools, str(row), first, count, later) for row, (count, first, later) in enumerate(rows)]


def test_the_tensors_say_what_the_schedule_says() -> None:
    pools = pools_of(60)
    inputs = PromptInputs(pools, LIMITS, max_pages=64, token_buckets=[8, 16, 32], device=CPU)
    schedule = [make(pools, "a", 10, 5), make(pools, "b", 7, 1), make(pools, "c", 0, 6, later=4)]
    pools[LayerKind.SLIDING].drop("a", 2)
    key = inputs.key(schedule)
    assert key == PromptKey(16, 6, 64)
    for host in inputs._host:
        host.fill_(GARBAGE)
    inputs._there.fill_(GARBAGE)
    inputs.fill(schedule, key)
    inputs.lay_tables(key)
    batch = inputs.batch(key)
    tokens = [t for work in schedule for t in work.request.tokens[work.first : work.first + work.count]]
    assert batch.token_ids.tolist() == [*tokens, 0, 0, 0, 0]
    assert batch.positions.tolist() == [*range(10, 15), 7, *range(6), *range(4)]
    for kind, pool in pools.items():
        attention = batch.attention[kind]
        assert attention.sizes == (6, 16, 64)
        assert attention.query_start.tolist() == [0, 5, 6, 12, 16, 16, 16]
        assert attention.context_lens.tolist() == [15, 8, 6, 4, 0, 0]
        slots = batch.slots[kind].tolist()
        for row, work in enumerate(schedule):
            pages = pool.pages_of(work.request.request_id)
            held = attention.page_table[row, : len(pages)].tolist()
            assert [page for page in held if page] == [page for page in pages if page > 0]
            start = int(attention.query_start[row])
            places = range(work.first, work.first + work.count)
            assert slots[start : start + work.count] == [pages[p // PAGE] * PAGE + p % PAGE for p in places]
        # The page after the last is nobody's.
        assert attention.page_table[3, 0] == pool.num_pages
        assert slots[12:] == [pool.num_pages * PAGE + offset for offset in range(4)]
        tail = inputs.tail_batch(2, key.pages, kind)
        assert tail.sizes == (2, 1, 64)
        assert (tail.context_lens.tolist(), tail.query_start.tolist()) == ([15, 8], [0, 1, 2])
        assert torch.equal(tail.page_table[:, :2], attention.page_table[:2, :2])
    assert inputs.rows(key).tolist() == [4, 5, 0, 0, 0]


def test_every_tensor_begins_where_kernels_expect_it() -> None:
    pools = pools_of(60)
    inputs = PromptInputs(pools, LIMITS, max_pages=63, token_buckets=[*range(1, 33)], device=CPU)
    for tokens in range(1, 33):
        for sequences in (2, 6):
            batch = inputs.batch(PromptKey(tokens, sequences, 63))
            attention = [value for each in batch.attention.values() for value in vars(each).values()]
            held = [batch.token_ids, batch.positions, *batch.slots.values(), *attention]
            assert all(each.data_ptr() % 16 == 0 for each in held if isinstance(each, torch.Tensor))


def test_what_no_bucket_holds_has_no_key() -> None:
    pools = pools_of(60)
    inputs = PromptInputs(pools, LIMITS, max_pages=64, token_buckets=[8], device=CPU)
    assert inputs.key([make(pools, "a", 0, 8)]) == PromptKey(8, 2, 64)
    assert inputs.key([make(pools, "b", 0, 9)]) is None
    scored = Work(Request("c", [1, 2, 3], SamplingParams(prompt_logprobs=0)), 0, 3)
    assert inputs.key([scored]) is None


@pytest.fixture(scope="module", params=["gpt-oss-tiny", "gemma-4-tiny", "qwen3-moe-tiny"])
def model(request: pytest.FixtureRequest) -> AnyModel:
    return load_model(EngineConfig(request.param, load_format="dummy", device="cpu", block_size=PAGE))


def started(model: AnyModel, pools: dict[LayerKind, PagePool], *, fill: bool) -> ModelRunner:
    limits = Limits(PAGE, model.config.sliding_window, 5, 64, 256)
    runner = ModelRunner(model, pools, limits, fill_up_prompts=fill)
    poison(runner._kv)
    return runner


def test_padding_changes_nothing(model: AnyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every amount of it, over KV pages and buffers that hold NaN and garbage; and what is in the cache is the same."""
    monkeypatch.setattr(runner_file, "buckets", lambda most, kernels: [33])
    for tokens in range(3, 34):
        pools = pools_of(120)
        filled, plain = (started(model, pools, fill=fill) for fill in (True, False))
        schedule = mixed(pools, tokens)
        for runner in (filled, plain):  # what came before in each sequence
            for work in schedule:
                if work.first:
                    runner._forward(build_batch([runner._chunk(Work(work.request, 0, work.first))], PAGE, CPU))
        assert filled._prompts is not None
        for host in filled._prompts.inputs._host:
            host.fill_(GARBAGE)
        filled._prompts.inputs._there.fill_(GARBAGE)
        key = filled._prompts.inputs.key(schedule)
        assert key is not None
        assert key.tokens == 33
        logits, expected = filled.forward(schedule).values, plain.forward(schedule).values
        assert logits.shape == expected.shape
        # Products of other numbers of rows add up in another order.
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(1), expected.argmax(1))
        for kind, ours, theirs in zip(
            (layer.kind for layer in model.layers), filled._kv.layers, plain._kv.layers, strict=True
        ):
            held = pools[kind].num_pages
            torch.testing.assert_close(ours.k[:held], theirs.k[:held], rtol=1e-4, atol=1e-4, equal_nan=True)
            torch.testing.assert_close(ours.v[:held], theirs.v[:held], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_steps_of_nobody_touch_nobodys_pages(model: AnyModel) -> None:
    pools = pools_of(60)
    runner = started(model, pools, fill=True)
    pages = runner._order.max_pages
    for key in (GraphKey(1, 16), GraphKey(3, pages), PromptKey(7, 2, pages), PromptKey(16, 6, pages)):
        runner._run_nobody(key)
    for layer, kv in zip(model.layers, runner._kv.layers, strict=True):
        held = pools[layer.kind].num_pages
        for each in (kv.k, kv.v):
            assert each[:held].isnan().all()
            assert each[held].isfinite().all()


def test_every_size_is_captured_when_there_is_time(model: AnyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start a net; the first of a kind once more, as it is. Later all that is missing."""
    on_paper(monkeypatch)
    monkeypatch.setattr("microscale.engine.step.capture_order.FIRST_ROWS", 2)
    monkeypatch.setattr("microscale.engine.step.capture_order.FEW", 3)
    runner = started(model, pools_of(60), fill=True)
    assert not runner.idle()  # there are no graphs on a CPU
    ran: list[Key] = []
    run_nobody = runner._run_nobody

    def noted(key: Key) -> None:
        ran.append(key)
        run_nobody(key)

    monkeypatch.setattr(runner, "_run_nobody", noted)
    enable(runner._graphs)
    runner.prepare()
    assert runner._prompts is not None
    pages = runner._order.max_pages
    decoding = [GraphKey(rows, pages) for rows in (1, 2, 4, 5)]
    net = [(64, 6), (64, 2), (43, 2), (33, 2), (22, 2)]
    prompts = [PromptKey(tokens, sequences, pages) for tokens, sequences in net]
    tails = [TailKey(rows, pages) for rows in (1, 2, 4, 5)]
    first = [*decoding, *prompts, *tails]
    assert ran == [decoding[0], *decoding, prompts[0], *prompts, tails[0], *tails]
    assert set(runner._graphs._graphs) == set(first)
    assert runner.graphs() == GraphCounts(len(first), 0, 0)
    ran.clear()
    # A capture runs nothing, whatever the inputs hold. On paper it would.
    monkeypatch.setattr(runner, "_task", lambda key: (1, whole(lambda: None)))
    while runner.idle():
        pass
    assert not ran
    largest_first = runner._prompts.inputs.buckets[::-1]
    every = [PromptKey(tokens, sequences, pages) for sequences in (2, 6) for tokens in largest_first]
    alone, among = ([key for key in every if key.sequences == size and key not in first] for size in (2, 6))
    expected = [*alone, GraphKey(3, pages), TailKey(3, pages), *among]
    assert [key for key in runner._graphs._graphs if key not in first] == expected
    assert runner.graphs() == GraphCounts(len(first) + len(expected), 0, 0)


def test_long_contexts_come_after_short_ones_but_for_their_net(model: AnyModel) -> None:
    limits = Limits(PAGE, model.config.sliding_window, 20, 64, 4 * SHORT_CONTEXT)
    runner = ModelRunner(model, pools_of(4 * SHORT_CONTEXT // PAGE), limits, fill_up_prompts=True)
    # Those that prompts with long contexts can stand in come first of all.
    net = list(takewhile(lambda key: key.pages == runner._order.max_pages, runner._later))
    assert [key.rows for key in net if isinstance(key, TailKey)] == [1, 2, 4, 8, 16, 20]
    prompts = [(key.tokens, key.sequences) for key in net if isinstance(key, PromptKey)]
    assert prompts == [(64, 21), (64, 2)]
    later = list(runner._later)[len(net) :]
    widths = [key.pages for key in later]
    assert sorted(set(widths)) == [SHORT_CONTEXT // PAGE, runner._order.max_pages]
    assert widths == sorted(widths)
    assert runner._prompts is not None
    assert runner._prompts.inputs.sequences == [2, 17, 21]
    first = [type(key).__name__ for key in later if key.pages == widths[0]]
    kinds = [kind for kind, before in zip(first, [None, *first], strict=False) if kind != before]
    # Prompts alone; decoding of 9 to 15; tails of up to 17; prompts with company; then more company.
    assert kinds == ["PromptKey", "GraphKey", "TailKey", "PromptKey", "GraphKey", "TailKey", "PromptKey"]
    assert [key.rows for key in later if isinstance(key, GraphKey)][:10] == [*range(9, 16), *range(17, 20)]


def test_prompts_among_many_come_before_very_many_that_decode(model: AnyModel) -> None:
    limits = Limits(PAGE, model.config.sliding_window, 200, 256, 256)
    runner = ModelRunner(model, pools_of(60), limits, fill_up_prompts=True)
    later = list(runner._later)
    assert runner._prompts is not None
    assert runner._prompts.inputs.sequences == [2, 17, 201]
    among_many = [place for place, key in enumerate(later) if isinstance(key, PromptKey) and key.sequences == 201]
    decoding = {key.rows: place for place, key in enumerate(later) if isinstance(key, GraphKey)}
    assert decoding[31] < among_many[0] < among_many[-1] < decoding[33]
    assert max(decoding) == 192  # 200 has a graph from the start
    assert len(set(later)) == len(later)


def test_work_ahead_is_left_between_layers_and_kept(model: AnyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    on_paper(monkeypatch)
    runner = started(model, pools_of(60), fill=True)
    enable(runner._graphs)
    runner.prepare()
    waiting, captured = list(runner._later), len(runner._graphs)
    is_due = after_layers(1)
    assert len(model.layers) > 1
    assert runner._prompts is not None
    assert isinstance(waiting[0], PromptKey)
    runner._prompts.inputs.fill([], waiting[0])  # on paper the layers run
    for _ in range(len(model.layers) - 1):  # the last layer and the queries of a prompt's last are one part
        assert runner.idle(is_due)
        assert list(runner._later) == waiting
    assert runner.idle(is_due)
    assert list(runner._later) == waiting[1:]
    assert len(runner._graphs) == captured + 1


def test_a_chunk_that_gives_no_logits(model: AnyModel) -> None:
    pools = pools_of(60)
    runner = started(model, pools, fill=True)
    logits = runner.forward([make(pools, "a", 0, 20, later=5)])
    assert logits.values.shape == (0, model.config.vocab_size)


def test_a_table_is_as_wide_as_the_sequence_that_fills_up_a_step(model: AnyModel) -> None:
    """Also where no request may be as long: attention would look for pages behind the table."""
    limits = Limits(PAGE, model.config.sliding_window, 5, 64, max_model_len=9)
    runner = ModelRunner(model, pools_of(60), limits, fill_up_prompts=True)
    assert runner._prompts is not None
    inputs = runner._prompts.inputs
    assert inputs.buckets[-1] == 64
    for key in (k for keys in (*runner._order.first(), runner._later) for k in keys if isinstance(k, PromptKey)):
        inputs.fill([], key)
        inputs.lay_tables(key)
        for kind, attention in inputs.batch(key).attention.items():
            held = attention.page_table[0, : -(-key.tokens // PAGE)].tolist()
            assert held == [runner._pools[kind].num_pages] * -(-key.tokens // PAGE)
