"""The step loop on a mock model that notices every wrong page: see ``support/mock_runner``."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from microscale.engine.graphs import GraphCounts
from microscale.engine.limits import Limits
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.work import Work
from microscale.errors import BadLogits, BadRequest, BadSetting, QueueFull
from microscale.kernels.dense.reference import summarise
from microscale.kernels.dense.spec import Logits
from support.mock_engine import VOCAB, System, alone
from support.mock_runner import MockRunner, next_token

SMALL = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=256)


def test_requests_get_the_tokens_that_they_would_get_alone() -> None:
    system = System(SMALL, 64, 32)
    prompts = {f"r{i}": [(7 * i + j) % VOCAB for j in range(3 + 9 * i)] for i in range(7)}
    for name, prompt in prompts.items():
        system.submit(name, prompt, 20)
    system.run()
    for name, prompt in prompts.items():
        assert system.tokens(name) == alone(prompt, 20, SMALL.window)
        assert system.outputs[name][-1].finish is Finish.LENGTH
    assert system.runner.largest_step <= SMALL.max_num_batched_tokens
    assert system.engine.stats().num_running == 0


def test_an_end_token_ends_a_request() -> None:
    tokens = alone([1, 2, 3], 30, SMALL.window)
    stop = tokens[5]
    system = System(SMALL, 64, 32, eos=[stop])
    system.submit("r", [1, 2, 3], 30)
    system.run()
    assert system.tokens("r") == alone([1, 2, 3], 30, SMALL.window, [stop])
    assert system.outputs["r"][-1].finish is Finish.STOP


@pytest.mark.parametrize("run_ahead", [True, False])
def test_steps_run_ahead_of_their_tokens(run_ahead: bool) -> None:
    """While the same requests decode. An end token is noticed one step late, and that step's token is dropped."""
    ahead = 0

    class Counting(MockRunner):
        def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
            nonlocal ahead
            ahead += tokens is not None
            return super().forward(schedule, tokens)

    stop = alone([1, 2, 3], 30, SMALL.window)[9]
    system = System(SMALL, 64, 32, eos=[stop], run_ahead=run_ahead)
    system.runner.__class__ = Counting
    system.submit("long", [4, 5], 25)
    system.submit("short", [1, 2, 3], 30)
    system.run()
    for name, prompt, most in (("long", [4, 5], 25), ("short", [1, 2, 3], 30)):
        assert system.tokens(name) == alone(prompt, most, SMALL.window, [stop])
    assert (ahead > 15) if run_ahead else (ahead == 0)


def test_requests_that_come_and_end_do_not_keep_steps_from_running_ahead() -> None:
    """Only the first step of all has no other before it. Those that go on stay in their rows of the page tables."""
    ahead: list[int] = []
    moved = 0
    rows: dict[str, int] = {}

    class Watching(MockRunner):
        def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
            nonlocal moved, rows
            ahead.append(sum(work.ahead for work in schedule))
            assert ahead[-1] == (0 if tokens is None else len(tokens))
            assert all(work.ahead for work in schedule if work.first >= work.request.num_prompt)
            at = {work.request.request_id: row for row, work in enumerate(schedule)}
            moved += sum(row != at.get(name, row) and row < len(schedule) for name, row in rows.items())
            rows = at
            return super().forward(schedule, tokens)

    limits = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=256)
    system = System(limits, 64, 32)
    system.runner.__class__ = Watching
    for index in range(9):
        system.submit(f"r{index}", [index] * (3 + 2 * index), 4 + index % 3)
    steps = system.run()
    for index in range(9):
        assert system.tokens(f"r{index}") == alone([index] * (3 + 2 * index), 4 + index % 3, limits.window)
    assert moved == 0
    assert len(ahead) <= steps <= len(ahead) + 1
    assert sum(ahead) == sum(3 + index % 3 for index in range(9))


def test_graphs_are_counted() -> None:
    class Counting(MockRunner):
        def graphs(self) -> GraphCounts:
            return GraphCounts(70, 4, 9)

    system = System(SMALL, 64, 32)
    system.runner.__class__ = Counting
    stats = system.engine.stats()
    assert (stats.graphs, stats.graphs_waited_for, stats.graph_stand_ins) == (70, 4, 9)


@pytest.mark.parametrize("free", [40, 8])
def test_full_pools_do_not_keep_steps_from_running_ahead(free: int) -> None:
    """Eight requests, each of which needs a page in every sixteenth step."""
    ahead: list[bool] = []

    class Watching(MockRunner):
        def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
            ahead.append(tokens is not None)
            return super().forward(schedule, tokens)

    limits = Limits(page_size=16, window=32, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=256)
    system = System(limits, 8 * 4 + free - 8, 8 * 3 + 4)
    system.runner.__class__ = Watching
    for index in range(8):
        system.submit(f"r{index}", [index] * (3 + index), 50)
    system.run()
    for index in range(8):
        assert system.tokens(f"r{index}") == alone([index] * (3 + index), 50, limits.window)
    assert ahead.count(False) <= 2


def test_a_prompt_that_is_scored_holds_nobody_up() -> None:
    """Its launch waits for the device, so what was launched before is read before it."""
    system = System(SMALL, 64, 64)
    system.submit("decodes", [1, 2], 20)
    for _ in range(4):
        system.step()
    system.engine.submit(Request("scored", (3, 4, 5), SamplingParams(max_tokens=2, prompt_logprobs=0)))
    system.outputs["scored"] = []
    read: list[int] = []

    class Watching(MockRunner):
        def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
            if any(work.request.scoring for work in schedule):
                read.append(sum(work.ahead for work in schedule))
            return super().forward(schedule, tokens)

    system.runner.__class__ = Watching
    system.run()
    assert read == [0]
    assert system.tokens("decodes") == alone([1, 2], 20, SMALL.window)


def test_a_stop_token_does_not_keep_steps_from_running_ahead() -> None:
    """The step that was launched for the request that has ended does not have to be read before the next one."""
    behind = 0

    class Watching(MockRunner):
        def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
            nonlocal behind
            behind += any(work.first >= work.request.num_prompt and not work.ahead for work in schedule)
            return super().forward(schedule, tokens)

    prompts = {f"r{index}": [index, index + 1] for index in range(4)}
    stops = [alone(prompts["r0"], 30, SMALL.window)[5], alone(prompts["r2"], 30, SMALL.window)[12]]
    system = System(SMALL, 64, 64, eos=stops)
    system.runner.__class__ = Watching
    for name, prompt in prompts.items():
        system.submit(name, prompt, 30)
    system.run()
    ended = [system.outputs[name][-1].finish for name in prompts]
    assert ended.count(Finish.STOP) >= 2
    for name, prompt in prompts.items():
        assert system.tokens(name) == alone(prompt, 30, SMALL.window, stops)
    assert behind == 0


@pytest.mark.parametrize("others", [0, 1, 2])
def test_a_prompt_that_is_scored_token_by_token_is_no_decoding(others: int) -> None:
    limits = Limits(
        page_size=4, window=6, max_num_seqs=others + 1, max_num_batched_tokens=others + 1, max_model_len=256
    )
    system = System(limits, 64, 32)
    for index in range(others):
        system.submit(f"d{index}", [index], 30)
    prompt = tuple(range(9))
    system.engine.submit(Request("scored", prompt, SamplingParams(max_tokens=3, prompt_logprobs=0)))
    system.outputs["scored"] = []
    system.run()
    told = [token for output in system.outputs["scored"] for token, _, _ in output.prompt_logprobs]
    assert told == list(prompt[1:])
    assert system.tokens("scored") == alone(prompt, 3, limits.window)
    for index in range(others):
        assert system.tokens(f"d{index}") == alone([index], 30, limits.window)


def test_a_request_that_comes_back_under_its_old_name_gets_no_token_of_the_old_one() -> None:
    system = System(SMALL, 64, 32)
    for turn, prompt in enumerate(([1, 2, 3], [9, 8, 7, 6, 5], [2])):
        system.submit("r", prompt, 20)
        for _ in range(turn + 4):
            system.step()
        if turn < 2:
            assert system.engine.abort("r")
    system.run()
    assert system.tokens("r") == alone([2], 20, SMALL.window)


@pytest.mark.usefixtures("admits_until_pages_run_out")
def test_a_full_pool_preempts_and_nobody_notices() -> None:
    # Four requests of up to 40 tokens need 40 pages; there are 14.
    system = System(SMALL, 14, 14)
    for index in range(4):
        system.submit(f"r{index}", [index, 5, 6, 7], 36)
    system.run()
    assert system.engine.stats().num_preemptions > 0
    for index in range(4):
        assert system.tokens(f"r{index}") == alone([index, 5, 6, 7], 36, SMALL.window)


def test_a_full_pool_computes_few_tokens_twice() -> None:
    """Half of the sequences that may run fit. Without room to grow most tokens are computed twice."""
    limits = Limits(page_size=16, window=64, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=1024)
    computed = 0

    class Counting(MockRunner):
        def forward(self, schedule: Sequence[Work], tokens: Tensor | None = None) -> Logits:
            nonlocal computed
            computed += sum(work.count for work in schedule)
            return summarise(torch.zeros(sum(work.num_logits for work in schedule), VOCAB))

    system = System(limits, 32 * 120 // 16, 2000)
    system.runner.__class__ = Counting
    chooser = random.Random(0)
    needed = 0
    for index in range(100):
        prompt, new = chooser.randrange(20, 80), chooser.randrange(100, 300)
        system.submit(f"r{index}", [index % VOCAB] * prompt, new)
        needed += prompt + new - 1
    while system.engine.has_work:
        system.engine.step()
    assert system.engine.stats().num_preemptions > 0
    assert computed - needed < 0.2 * needed


def test_an_abort_frees_its_pages_at_once() -> None:
    system = System(SMALL, 32, 32)
    system.submit("gone", range(30), 30)
    system.submit("stays", [1, 2], 10)
    for _ in range(4):
        system.step()
    assert system.engine.abort("gone")
    assert not system.engine.abort("gone")
    system.scheduler.check()
    assert not any(pool.pages_of("gone") for pool in system.scheduler.pools.values())
    system.run()
    assert system.tokens("stays") == alone([1, 2], 10, SMALL.window)


def test_priorities_go_first_and_old_requests_rise() -> None:
    limits = Limits(page_size=4, window=6, max_num_seqs=1, max_num_batched_tokens=16, max_model_len=256)
    system = System(limits, 64, 32)
    system.submit("first", [1], 3)
    system.step()
    system.submit("low", [2], 3, priority=5)
    system.submit("high", [3], 3, priority=-1)
    order = []
    while system.engine.has_work:
        order += [output.request_id for output in system.step() if output.finish]
    assert order == ["first", "high", "low"]
    # A stream of better requests cannot keep one waiting for ever.
    system = System(limits, 64, 32)
    system.submit("low", [2], 1, priority=2)
    served = 0
    while "low" in system.engine._rows:
        system.submit(f"high{served}", [3], 1, priority=0)
        system.step()
        served += 1
        assert served < 3000


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    limits = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=128, max_model_len=4096)
    system = System(limits, 1024, 256)
    system.submit("long", [j % VOCAB for j in range(3000)], 1)
    system.step()
    system.submit("short", [1, 2, 3], 1)
    steps = 0
    while not system.outputs["short"]:
        system.step()
        steps += 1
    assert steps <= 2
    system.run()


def first_steps(system: System) -> dict[str, int]:
    """In which step each request has its first token."""
    found: dict[str, int] = {}
    steps = 0
    while system.engine.has_work:
        steps += 1
        for output in system.step():
            found.setdefault(output.request_id, steps)
    return found


def test_prompts_that_come_together_are_done_one_after_the_other() -> None:
    """Not all of them in the last step: with equal shares half of the users would wait twice as long."""
    limits = Limits(page_size=4, window=6, max_num_seqs=8, max_num_batched_tokens=128, max_model_len=4096)
    system = System(limits, 1024, 256)
    for index in range(8):
        system.submit(f"r{index}", [(index + j) % VOCAB for j in range(64)], 1)
    # A step is read with the next one.
    assert first_steps(system) == {f"r{index}": index // 2 + 2 for index in range(8)}


def test_a_long_prompt_goes_on_while_short_ones_come() -> None:
    limits = Limits(page_size=4, window=6, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=4096)
    system = System(limits, 1024, 256)
    long = system.submit("long", [j % VOCAB for j in range(3000)], 1)
    steps = 0
    while not system.outputs["long"]:
        for number in range(3):
            system.submit(f"short{steps}-{number}", [number + 1] * 60, 1)
        before = long.num_computed
        system.step()
        steps += 1
        assert system.outputs["long"] or long.num_computed - before >= 64
    assert steps <= 3000 // 64 + 1
    system.run()


def test_what_can_never_fit_is_refused_at_once() -> None:
    system = System(SMALL, 8, 8)
    with pytest.raises(BadRequest, match=r"needs 13 KV pages of 4 tokens and there are 8 in all: 50 tokens never fit"):
        system.submit("r", range(40), 10)
    with pytest.raises(BadRequest, match="exceed the context of 256"):
        system.submit("r", range(90), 200)
    with pytest.raises(BadRequest, match="prompt is empty"):
        system.submit("r", [], 10)
    with pytest.raises(BadRequest, match="Token id 97 is not in the vocabulary of 97"):
        system.submit("r", [1, 97], 10)
    with pytest.raises(BadRequest, match="sliding KV pages"):
        System(SMALL, 64, 2).submit("r", range(40), 10)
    assert not system.engine.has_work


def test_the_queue_is_bounded() -> None:
    limits = Limits(page_size=4, window=6, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=64, max_queue=2)
    system = System(limits, 64, 32)
    system.submit("a", [1], 2)
    system.submit("b", [1], 2)
    with pytest.raises(QueueFull, match="2 requests are waiting already; try again later, or raise --max-queue"):
        system.submit("c", [1], 2)
    with pytest.raises(BadRequest, match="'a' is already here"):
        system.submit("a", [1], 2)
    system.run()


def test_a_step_must_hold_every_sequence() -> None:
    with pytest.raises(BadSetting, match="max_num_seqs 8 is more than max_num_batched_tokens 4"):
        Limits(page_size=4, window=6, max_num_seqs=8, max_num_batched_tokens=4)


def test_a_request_with_broken_logits_ends_alone() -> None:
    system = System(SMALL, 64, 32)
    forward = system.runner.forward

    def broken(schedule, tokens=None):  # type: ignore[no-untyped-def]
        logits = forward(schedule, tokens)
        rows = [work.request.request_id for work in schedule for _ in range(work.num_logits)]
        if "bad" in rows:
            logits.values[rows.index("bad")] = float("nan")
            return summarise(logits.values)
        return logits

    system.runner.forward = broken  # type: ignore[method-assign]
    system.submit("good", [1, 2, 3], 8)
    system.submit("bad", [4, 5, 6], 8)
    system.run()
    assert system.tokens("good") == alone([1, 2, 3], 8, SMALL.window)
    (last,) = system.outputs["bad"]
    assert (last.token, last.finish) == (None, Finish.ERROR)
    assert isinstance(last.error, BadLogits)


def test_prompts_are_scored_token_by_token() -> None:
    """In small steps, beside others, and without the prefix cache's help: rows that do not run have no logits."""
    system = System(SMALL, 64, 32)
    prompt = [5, 6, 7, 8] * 8
    system.submit("before", prompt, 2)
    system.run()
    request = Request("scored", tuple(prompt), SamplingParams(max_tokens=2, prompt_logprobs=3))
    system.engine.submit(request)
    system.outputs["scored"] = []
    system.submit("beside", prompt, 4)
    system.run()
    outputs = system.outputs["scored"]
    scored = [entry for output in outputs for entry in output.prompt_logprobs]
    assert [token for token, _, _ in scored] == prompt[1:]
    for place, (token, logprob, top) in enumerate(scored, start=1):
        likeliest = next_token(prompt[:place], SMALL.window, VOCAB)
        row = torch.full((VOCAB,), -1.0)
        row[likeliest] = 1.0
        want = row.log_softmax(0)
        assert logprob == pytest.approx(float(want[token]), abs=1e-5)
        first: object = (likeliest, pytest.approx(float(want.max()), abs=1e-5))
        assert top[0] == first
        assert len(top) == 3
    tokens = [output.token for output in outputs if output.token is not None]
    assert tokens == alone(prompt, 2, SMALL.window)
    assert request.num_cached == 0


def test_a_preempted_prompt_is_scored_once() -> None:
    # The first is preempted in the midst of its prompt, and begins anew.
    system = System(SMALL, 24, 24)
    prompts = {name: [(7 * i + j) % VOCAB for j in range(60)] for i, name in enumerate("ab")}
    requests = {
        name: Request(name, tuple(p), SamplingParams(max_tokens=4, prompt_logprobs=0)) for name, p in prompts.items()
    }
    for name, request in requests.items():
        system.outputs[name] = []
        system.engine.submit(request)
        system.step()
    for _ in range(3):
        system.step()
    system.scheduler._preempt(requests["a"])
    system.run()
    for name, prompt in prompts.items():
        told = [entry[0] for output in system.outputs[name] for entry in output.prompt_logprobs]
        assert told == prompt[1:]
        assert system.tokens(name) == alone(prompt, 4, SMALL.window)


# ---- prefix cache ----------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_once() -> None:
    system = System(SMALL, 64, 32)
    prompt = [j % VOCAB for j in range(30)]
    first = system.submit("first", prompt, 8)
    system.run()
    again = system.submit("again", prompt, 8)
    longer = system.submit("longer", [*prompt, 3, 4, 5], 8)
    system.run()
    assert (first.num_cached, again.num_cached, longer.num_cached) == (0, 28, 28)
    stats = system.engine.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (30 + 30 + 33, 28 + 28)
    assert {output.num_cached for output in system.outputs["again"]} == {28}
    assert system.tokens("again") == system.tokens("first") == alone(prompt, 8, SMALL.window)
    assert system.tokens("longer") == alone([*prompt, 3, 4, 5], 8, SMALL.window)


def test_a_conversation_goes_on_from_its_last_answer() -> None:
    system = System(SMALL, 64, 32)
    prompt = [5] * 20
    system.submit("turn 1", prompt, 10)
    system.run()
    said = [token for token in system.tokens("turn 1") if token is not None]
    second = system.submit("turn 2", prompt + said + [1, 2], 5)
    system.run()
    assert second.num_cached == 28  # 29 tokens of turn 1 are in the cache: its last token never ran
    assert system.tokens("turn 2") == alone(prompt + said + [1, 2], 5, SMALL.window)


def test_tenants_share_nothing() -> None:
    system = System(SMALL, 64, 32)
    prompt = [9] * 20
    system.submit("a", prompt, 2, cache_salt="tenant a")
    system.run()
    b = system.submit("b", prompt, 2, cache_salt="tenant b")
    c = system.submit("c", prompt, 2, cache_salt="tenant a")
    system.run()
    assert (b.num_cached, c.num_cached) == (0, 16)


def test_without_the_prefix_cache_nothing_is_found() -> None:
    limits = Limits(4, 6, 4, 16, 256, prefix_caching=False)
    system = System(limits, 64, 32)
    for name in ("a", "b"):
        request = system.submit(name, [9] * 20, 2)
        system.run()
        assert request.num_cached == 0


def test_the_shared_prefix_survives_a_full_pool() -> None:
    """Requests with one system prompt and otherwise new text, through pools that hold a few of them: once the prompt
    was found again, what nobody asks for twice goes first, of the sliding layers' pages too."""
    limits = Limits(page_size=4, window=8, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=512)
    system = System(limits, 60, 24)
    chooser = random.Random(0)
    system_prompt = [chooser.randrange(VOCAB) for _ in range(64)]
    hits = []
    for turn in range(60):
        own = [chooser.randrange(VOCAB) for _ in range(60)]
        request = system.submit(f"r{turn}", system_prompt + own, 12)
        system.run()
        hits.append(request.num_cached)
    assert sum(pool.num_evicted for pool in system.scheduler.pools.values()) > 500
    assert hits[0] == 0
    assert min(hits[2:]) >= 64, hits


# ---- everything at random --------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_stream_of_requests(data: st.DataObject) -> None:
    """Arrivals, lengths, aborts, priorities, salts, pools: pages are never lost or mixed up, all requests end, and each
    gets the tokens that it would get alone."""
    draw = data.draw
    page_size = draw(st.sampled_from([1, 2, 4, 8]))
    window = draw(st.integers(1, 20))
    limits = Limits(
        page_size=page_size,
        window=window,
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(6, 40)),
        max_model_len=64,
        max_queue=50,
        prefix_caching=draw(st.booleans()),
    )
    least = -(-64 // page_size)
    system = System(
        limits, draw(st.integers(least, 3 * least)), draw(st.integers(-(-window // page_size) + 1, 3 * least))
    )
    chooser = random.Random(draw(st.integers(0, 2**32)))
    shared = [chooser.randrange(VOCAB) for _ in range(40)]
    prompts: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    for turn in range(draw(st.integers(5, 60))):
        if chooser.random() < 0.4:
            name = f"r{turn}"
            prompt = shared[: chooser.randrange(30)] + [
                chooser.randrange(VOCAB) for _ in range(1 + chooser.randrange(20))
            ]
            max_tokens = 1 + chooser.randrange(64 - len(prompt))
            prompts[name] = (prompt, max_tokens)
            system.submit(
                name, prompt, max_tokens, priority=chooser.randrange(3), cache_salt=chooser.choice(["", "", "other"])
            )
        if prompts and chooser.random() < 0.1:
            name = chooser.choice(list(prompts))
            if system.engine.abort(name):
                aborted.add(name)
        system.step()
    system.run()
    for name, (prompt, max_tokens) in prompts.items():
        want = alone(prompt, max_tokens, window)
        got = system.tokens(name)
        assert got == want[: len(got)]
        assert name in aborted or len(got) == len(want)
    assert system.runner.largest_step <= limits.max_num_batched_tokens


@pytest.mark.nightly
def test_memory_stays_flat() -> None:
    """What a finished request held is let go: 200 requests and 600 later the engine holds as much."""
    system = System(SMALL, 48, 24)
    chooser = random.Random(1)

    def some(count: int, start: int) -> None:
        for index in range(start, start + count):
            system.submit(f"r{index}", [chooser.randrange(VOCAB) for _ in range(12)], 8)
            if index % 4 == 3:
                system.run()
        system.run()
        system.outputs.clear()

    some(200, 0)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    some(600, 200)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 200_000
