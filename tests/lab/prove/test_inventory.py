"""What is proved is what is started: the list comes from the models' own code, and no size in between is missing."""

from __future__ import annotations

import ast
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import microscale
from microscale.engine.graph_sizes import decode_key, verify_key
from microscale.engine.limits import Limits
from microscale.engine.pages import PagePool
from microscale.engine.runner import ModelRunner
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.sampling_state import Sampler
from microscale.hardware import known
from microscale.kernels.launch import Launch, launch, watching
from microscale.kernels.moe.spec import Gate, GateKind, MoeSpec
from microscale.models import dummy_weights
from microscale.models.config import MAX_DRAFT, PAGED, LayerKind
from microscale.models.families import AnyModel
from microscale.models.recorded import (
    MAX_SEQUENCES,
    MAX_TOKENS,
    Step,
    Wanted,
    bind_shapes,
    record,
    run_step,
    token_counts,
)
from microscale.planning.ops import Activations, Kernel, Ops, Preference, recording
from microscale.planning.precision import PRECISIONS
from microscale.planning.shards import record_moe, shards
from microscale_lab.prove import inventory
from support.listed import assert_listed

META = torch.device(dummy_weights.META)
KERNELS = Path(microscale.__file__).parent / "kernels"
ASKED = [
    ("h200", "gpt-oss-20b", "exact"),
    ("h200", "gemma-4-26b-a4b", "balanced"),
    ("gb10", "demo", "fast"),
    ("h200", "qwen3-30b-a3b", "exact"),
]


@cache
def bound(card: str, name: str, precision: str) -> tuple[AnyModel, dict[Kernel, Launch]]:
    """A model, and all that it was recorded to start."""
    ops = Ops(known(card), Activations.BF16, Preference(), PRECISIONS[precision])
    model = bind_shapes(inventory.models()[name], ops)
    return model, record(model, draft_tokens=MAX_DRAFT)


def kernels_of(model: AnyModel, *steps: Step) -> set[Kernel]:
    with recording() as found:
        for step in steps:
            run_step(model, step, model.new_cache(dict.fromkeys(LayerKind, 4)))
    return set(found)


@st.composite
def any_step(draw: st.DrawFn, max_context: int) -> Step:
    """Any sizes that a server may run."""
    pages = draw(st.integers(1, max_context // 16))
    if draw(st.booleans()):
        sequences = draw(st.integers(1, MAX_SEQUENCES))
        return Step(sequences, sequences, 1, pages)
    if draw(st.booleans()):
        drafted = 1 << draw(st.integers(1, 4))
        sequences = draw(st.integers(1, MAX_SEQUENCES // 16))
        tokens = draw(st.integers(drafted + sequences - 1, drafted * sequences))
        return Step(tokens, sequences, drafted, pages, verify=True)
    longest = draw(st.integers(1, 4) | st.integers(1, MAX_TOKENS))
    sequences = draw(st.integers(1, 3) | st.integers(1, MAX_SEQUENCES))
    tokens = draw(
        st.integers(longest + sequences - 1, max(longest + sequences - 1, min(MAX_TOKENS, longest * sequences)))
    )
    rows = draw(st.none() | st.integers(0, sequences))
    return Step(tokens, sequences, longest, pages, rows)


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
@settings(max_examples=60)
@given(data=st.data())
def test_no_size_starts_a_kernel_that_is_not_listed(asked: tuple[str, str, str], data: st.DataObject) -> None:
    model, listed = bound(*asked)
    assert_listed(kernels_of(model, data.draw(any_step(model.config.max_context))), listed)


@pytest.mark.parametrize(
    ("step", "other"),
    [
        (Step(6, 6, 1, 64), Step(7, 7, 1, 64)),  # 24 and 28 pairs
        (Step(66, 66, 1, 64), Step(80, 80, 1, 64)),
        (Step(3000, 1, 3000, 512), Step(3001, 1, 3001, 512)),
        (Step(1, 1, 1, 1000), Step(1, 1, 1, 1001)),  # tables of another width
        (Step(300, 3, 200, 100, 3), Step(301, 3, 201, 101, 3)),
    ],
)
def test_batch_sizes_of_one_path_start_the_same_kernels(step: Step, other: Step) -> None:
    """Integers that vary with the batch are not specialised: a new batch size must not compile for seconds."""
    model, _ = bound("h200", "gpt-oss-20b", "exact")
    assert kernels_of(model, step) == kernels_of(model, other)


def runner_of(model: AnyModel, sequences: int, drafts: int) -> ModelRunner:
    """A runner on tensors without memory, for contexts of up to 130 pages."""
    limits = Limits(16, 128, max_num_seqs=sequences, max_model_len=130 * 16)
    pools = {kind: PagePool(130) for kind in PAGED}
    return ModelRunner(model, pools, limits, fill_up_prompts=False, draft_tokens=drafts)


def body(tokens: int, sequences: int, longest: int, pages: int) -> Step:
    return Step(tokens, sequences, longest, pages, rows=0)


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
def test_the_engines_own_inputs_start_listed_kernels(asked: tuple[str, str, str]) -> None:
    """Its tensors are views of others."""
    model, listed = bound(*asked)
    runner = runner_of(model, 130, drafts=15)
    keys = [decode_key(rows, width) for rows in (*range(1, 10), 33, 64, 70, 116, 130) for width in (3, 128, 130)]
    for rows, each, width in product((1, 2, 3, 9, 25), (2, 3, 5, 8, 16), (128, 130)):
        keys.append(verify_key([each] * rows, width))
    keys += runner._sizes.first()
    bodies = [body(sum(n), len(n), max(n), -(-max(n) // 16)) for n in ([1], [40], [5, 1, 300], [1, 999, 2, 17, 3])]
    for tokens, sequences, width in product((1, 2, 3, 17, 40, 65, 300, 1000, 1024), (2, 71, 131), (128, 130)):
        bodies.append(body(tokens, sequences, tokens, width))
    with recording() as started:
        for key in keys:
            runner._compute(key)
        for key in bodies:
            runner._body(key)
            for rows in (0, 1, 3, 64, 70, 280):
                runner._tail(rows, key.pages)
    assert started
    assert_listed(started, listed)


def test_the_engines_own_sampling_starts_listed_kernels() -> None:
    """What requests ask for travels in few tensors, whose rows are not aligned."""
    model, listed = bound("h200", "gpt-oss-20b", "exact")
    vocab = model.config.vocab_size
    options = (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_k=40, logprobs=3),
        SamplingParams(presence_penalty=0.5, logit_bias={5: 1.0}, logprobs=1),
        SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, min_tokens=2),
    )
    for rows in (1, 2, 3, 4, 7):
        for first in range(len(options)):
            sampler = Sampler(model.sampling, vocab, torch.device("cpu"), [1])
            numbers = [sampler.add(options[max(first - row, 0)]) for row in range(rows)]
            with recording() as started:
                sampler.draw(torch.zeros(rows, vocab), numbers)
            assert started
            assert_listed(started, listed)


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
@pytest.mark.parametrize(("length", "draws", "drafts"), [(3, False, 0), (40, True, 7), (700, False, 0)])
def test_a_command_that_knows_its_prompt_lists_what_it_starts_and_little_else(
    asked: tuple[str, str, str], length: int, draws: bool, drafts: int
) -> None:
    """``generate``: one sequence, by the engine's own inputs."""
    model, everything = bound(*asked)
    listed = record(model, draft_tokens=drafts, wanted=Wanted(max(length, 2 * drafts), draws=draws))
    assert_listed(listed, everything)
    assert len(listed) < len(everything) * 0.7
    runner = runner_of(model, 1, drafts)
    params = SamplingParams(temperature=1.0 if draws else 0.0)
    with recording() as started:
        for key in [decode_key(1, width) for width in (3, 128, 130)]:
            runner._compute(key)
        for count in range(2, drafts + 2):
            runner._compute(verify_key([count], 130))
        for tokens in {1, 2, length // 2, length - 1, length}:
            runner._body(body(tokens, 1, tokens, -(-tokens // 16)))
            runner._tail(0, -(-tokens // 16))
            runner._tail(1, -(-tokens // 16))
        for tokens, width in product((1, 2, 3, 17, 40, 65, 300, 700), (128, 130)):
            if tokens <= length:
                runner._body(body(tokens, 2, tokens, width))
                runner._tail(1, width)
        sampler = Sampler(model.sampling, model.config.vocab_size, torch.device("cpu"), [1])
        sampler.draw(torch.zeros(1, model.config.vocab_size), [sampler.add(params)])
    assert_listed(started, listed)


def test_a_command_with_many_sequences_lists_what_it_starts() -> None:
    """From 116 sequences on, decode has another tile on an H200."""
    model, _ = bound("h200", "gpt-oss-20b", "exact")
    listed = record(model, wanted=Wanted(4096, 128))
    runner = runner_of(model, 128, drafts=0)
    with recording() as started:
        for rows, width in product((1, 64, 115, 116, 128), (3, 128, 130)):
            runner._compute(decode_key(rows, width))
        for sequences, width in product((2, 17, 129), (128, 130)):
            runner._body(body(600, sequences, 600, width))
    assert_listed(started, listed)


OF_THE_MODEL = {"blocks", "k_tiles"}
"""Integers that a model's sizes set, and a few values share the constants: blocks of logits, tiles along K."""


@pytest.mark.parametrize("asked", ASKED, ids=" ".join)
def test_one_set_of_constants_and_types_is_one_kernel(asked: tuple[str, str, str]) -> None:
    _, listed = bound(*asked)
    alike: dict[object, list[Kernel]] = {}
    for kernel in listed:
        arguments = zip(kernel.fn.params, kernel.specialisation, strict=True)
        known = [value if param.is_constexpr else value[0] for param, value in arguments]
        alike.setdefault((kernel.name, str(known), kernel.options), []).append(kernel)
    for kernels in alike.values():
        values = zip(kernels[0].fn.arg_names, *(kernel.specialisation for kernel in kernels), strict=True)
        assert {name for name, *others in values if len(set(others)) > 1} <= OF_THE_MODEL


def test_one_kernel_out_of_the_list_fails() -> None:
    """What ``tests/gpu`` asserts of real launches, with any one kernel missing from the list."""
    model, listed = bound("h200", "gpt-oss-20b", "exact")
    started = kernels_of(model, Step(1, 1, 1, 8))
    assert_listed(started, listed)
    for gone in started:
        with pytest.raises(AssertionError, match=rf"1 kernels were started .*\n  {gone.name}: "):
            assert_listed(started, [kernel for kernel in listed if kernel != gone])


def test_the_embedded_model_and_vllms_shards_are_listed() -> None:
    found = inventory.recorded(known("h200"), ["gpt-oss-20b", "demo"], inventory.SETTINGS[:1])
    widths: dict[str, set[int]] = {}
    for kernel, users in found.items():
        if kernel.short_name in ("down_small", "down_direct"):
            for user in users:
                widths.setdefault(user, set()).add(kernel.constants["K"])
    assert widths["gpt-oss-20b"] == {2880}
    assert widths["demo"] == {256}
    assert widths["gpt-oss-20b in vLLM"] == {2880, 1440, 736, 384}


def test_shards_are_what_vllm_asks_for() -> None:
    gate = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
    spec = MoeSpec(128, 4, 2880, 2880, "mxfp4", Activations.BF16, gate, True, 1)
    found = [(shard.num_experts, shard.intermediate) for shard in shards(spec)]
    assert found == [(128, 2880), (128, 1440), (128, 736), (128, 384), (68, 2880), (36, 2880), (20, 2880)]
    gemma = MoeSpec(128, 8, 2816, 704, "mxfp8", Activations.BF16, Gate(GateKind.GELU_TANH, False), False, 1)
    assert [shard.intermediate for shard in shards(gemma)] == [704, 352, 704, 704, 704]
    assert record_moe(gemma, known("a100"), (1, 300))


@pytest.mark.parametrize("card", ["h200", "a100", "gb10"])
def test_the_default_dtype_changes_no_kernel(card: str) -> None:
    """vLLM builds its layers, and asks us, with bfloat16 as torch's default."""
    gpt_oss = MoeSpec(
        32, 4, 2880, 2880, "mxfp4", Activations.BF16, Gate(GateKind.SWIGLU_CLAMPED, interleaved=True), True, 1
    )
    gemma = MoeSpec(128, 8, 2816, 704, "mxfp8", Activations.BF16, Gate(GateKind.GELU_TANH, False), False, 1)
    for spec in (gpt_oss, gemma):
        counts = (1, 16, 300, 8192)
        expected = record_moe(spec, known(card), counts).keys()
        torch.set_default_dtype(torch.bfloat16)
        try:
            found = record_moe(spec, known(card), counts).keys()
        finally:
            torch.set_default_dtype(torch.float32)
        assert found == expected


def test_every_size_that_a_path_may_end_at_is_among_the_tokens() -> None:
    counts = token_counts()
    assert counts[:72] == list(range(1, 73))
    assert counts[-1] == MAX_TOKENS
    assert all(later <= earlier * 1.13 for earlier, later in pairwise(counts[71:]))


def launched_functions() -> set[str]:
    """Every jit function that some launcher names, by the source."""
    names = set()
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
                continue
            if node.value.id.endswith("jit") or node.value.id == "resident":
                names.add(node.attr)
    return names


@pytest.mark.slow
def test_every_function_that_is_launched_is_proved_somewhere() -> None:
    names = ["gpt-oss-20b", "gemma-4-26b-a4b", "qwen3.6-tiny", "gpt-oss-20b-eagle3"]
    found = {k.short_name for card in ("h200", "gb10") for k in inventory.recorded(known(card), names)}
    constants = {name for name in launched_functions() if name.isupper()}
    assert launched_functions() - constants == found


def test_a_launch_is_heard_and_started_or_not() -> None:
    started: list[tuple[object, ...]] = []

    class Fn:
        def run(self, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
            started.append((args, grid, warmup, kwargs))

    launch(Fn(), (3,), (1, 2), {"K": 4}, {"num_warps": 8})
    assert started == [((1, 2), (3,), False, {"K": 4, "num_warps": 8})]
    model, _ = bound("h200", "gpt-oss-20b", "exact")
    with recording() as outer:
        with recording() as inner:
            run_step(model, Step(1, 1, 1, 8), model.new_cache(dict.fromkeys(LayerKind, 4)))
        assert inner
        assert not outer
    launch(Fn(), (3,), (1, 2), {}, {})
    assert len(started) == 2


def test_what_the_inner_listener_lets_through_the_outer_hears_too() -> None:
    model, _ = bound("h200", "gpt-oss-20b", "exact")
    with recording() as outer, watching() as inner:
        run_step(model, Step(1, 1, 1, 8), model.new_cache(dict.fromkeys(LayerKind, 4)))
    assert inner
    assert list(inner) == list(outer)


def test_a_thread_records_its_own_launches() -> None:
    """An engine lists its kernels in one thread and packs its weights in another."""
    model, _ = bound("h200", "gpt-oss-20b", "exact")
    kv = model.new_cache(dict.fromkeys(LayerKind, 4))
    started: list[object] = []

    class Fn:
        def run(self, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
            started.append(args)

    def elsewhere() -> int:
        with recording() as found:
            run_step(model, Step(1, 1, 1, 8), kv)
        launch(Fn(), (1,), (), {}, {})
        return len(found)

    with ThreadPoolExecutor(1) as pool, recording() as found:
        there = pool.submit(elsewhere).result()
        assert not found
        assert len(started) == 1
        run_step(model, Step(1, 1, 1, 8), kv)
    assert len(found) == there > 3
    launch(Fn(), (1,), (), {}, {})
    assert len(started) == 2


def test_watching_lists_and_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, listed = bound("h200", "gpt-oss-20b", "exact")
    assert listed
    ran: list[Any] = []
    monkeypatch.setattr("microscale.kernels.launch._start", lambda fn, *rest: ran.append(fn))
    with watching() as found:
        run_step(model, Step(1, 1, 1, 8), model.new_cache(dict.fromkeys(LayerKind, 4)))
    assert found
    assert {fn.__name__ for fn in ran} == {kernel.short_name for kernel in found}


def test_specialisation_is_tritons_own() -> None:
    """Types, alignment of pointers, integers that are 1 or divide by 16; not where the function says otherwise."""
    model, _ = bound("h200", "gpt-oss-20b", "exact")
    with recording() as found:
        run_step(model, Step(9, 9, 1, 8), model.new_cache(dict.fromkeys(LayerKind, 4)))
    kernel = next(kernel for kernel in found if kernel.short_name == "list_small_batch")
    assert kernel.signature["x_ptr"] == "*bf16"
    assert kernel.signature["pairs"] == kernel.signature["width"] == "i32"
    by_name = dict(zip(kernel.signature, kernel.specialisation, strict=True))
    divisible = {name for name, (kind, value) in by_name.items() if kind != "constexpr" and "D" in (value or "")}
    assert {"x_ptr", "width", "stride_x", "num_experts"} <= divisible
    assert not {"pairs", "bound"} & divisible
    assert kernel.constants["PAIRS"] == 64
