"""What is settled before a load: each thing once, nothing read, and everything after it takes what was settled."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from msgspec import structs

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.loading import build, fit, prepare
from microscale.engine.loading.build import Precisions, Queueing, build_engine, describe
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import workload_of
from microscale.engine.predictions import CPU_STEP_S, LEAST_STEP_LIMIT_S, Phase, Point, step_limit_s
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import BadRequest, BadSetting, MicroscaleError, Unsupported
from microscale.explain import report
from microscale.models import embedded
from microscale.models.config import PAGED, LayerKind
from microscale.models.families import ModelConfig
from microscale.planning.ops import Activations
from microscale.planning.precision import make_precision

TINY = EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu", max_model_len=128, max_num_seqs=4, block_size=8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each part of preparing ran; the parts themselves are the real ones."""
    found: Counter[str] = Counter()

    def counted(module: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def count(*args: Any, **options: Any) -> Any:
            found[name] += 1
            return real(*args, **options)

        monkeypatch.setattr(module, name, count)

    for name in ("open_weights", "outline", "choose_device", "choose_activations", "gpu_of"):
        counted(prepare, name)
    for name in ("make_plan", "memory_for"):
        counted(fit, name)
    counted(hardware, "available_memory")
    return found


def test_everything_is_settled_once_from_options_to_engine(calls: Counter[str]) -> None:
    prepared = prepare.prepare(TINY)
    build_engine(prepared, Queueing())
    parts = ("open_weights", "outline", "choose_device", "choose_activations", "gpu_of", "make_plan", "memory_for")
    assert calls == Counter((*parts, "available_memory"))


def test_what_is_loaded_is_what_was_prepared() -> None:
    prepared = prepare.prepare(structs.replace(TINY, precision="fast"))
    model = load(prepared)
    assert model.ops.plan is prepared.plan
    assert (model.ops.gpu, model.ops.activations) == (prepared.setup.gpu, prepared.setup.activations)
    assert (model.config, model.page_size, model.device) == (prepared.config, 8, torch.device("cpu"))
    with pytest.raises(FrozenInstanceError):
        prepared.plan = model.ops.plan  # type: ignore[misc]


def test_the_engine_has_the_pages_that_were_reckoned() -> None:
    prepared = prepare.prepare(TINY)
    told: list[tuple[int, int]] = []
    built = build_engine(prepared, Queueing(), lambda done, total: told.append((done, total)))
    weights = sum(prepared.memory.weights.values())
    assert told == [(weights * layers // 4, weights) for layers in range(5)]
    pages = prepared.memory.pages()
    assert built.engine.stats().pages == {kind.value: (0, pages[kind]) for kind in PAGED}
    assert json.loads(built.plan)["memory"]["full_positions"] == 8 * pages[LayerKind.FULL]
    assert built.max_model_len == 128
    # Without one it is the model's, as far as the pages reach.
    longest = structs.replace(TINY, max_model_len=None, max_num_seqs=1)
    assert build_engine(prepare.prepare(longest), Queueing()).max_model_len == prepared.config.max_context


def test_speeds_are_predicted_while_the_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the other's beginning. What goes wrong with them is told."""
    reading, predicting = threading.Event(), threading.Event()

    def points(prepared: prepare.Prepared, max_model_len: int) -> list[Point]:
        predicting.set()
        assert reading.wait(60)
        raise ZeroDivisionError("of a prediction")

    def read(*arguments: object) -> object:
        reading.set()
        assert predicting.wait(60)
        return load(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "_points", points)
    monkeypatch.setattr(build, "load", read)
    with pytest.raises(ZeroDivisionError, match="of a prediction"):
        build_engine(prepare.prepare(TINY), Queueing())


def test_what_is_told_of_an_engine_holds_the_speeds_that_explain_predicts() -> None:
    """For a GPU: the same figures. On a CPU, whose times only rank implementations: none."""
    tiny = prepare.prepare(TINY)
    assert json.loads(build_engine(tiny, Queueing()).plan)["predicted"] == []
    found = report.explain(report.Question("gpt-oss-20b", "h200"))
    prepared = replace(tiny, setup=found.setup, outline=found.outline, plan=found.plan, memory=found.memory)
    points = build._points(prepared, max_model_len=131072)
    told = json.loads(
        describe(found.plan, Precisions(found.setup.precision), found.memory, dict.fromkeys(LayerKind, 4), points)
    )["predicted"]
    assert [(row["kind"], row["batch"]) for row in told][:3] == [("decode", 1), ("decode", 8), ("decode", 64)]
    same = {(point.kind, point.batch, point.context): point for point in found.points}
    assert points
    for point in points:
        assert point == same[point.kind, point.batch, point.context]
    assert all(row["low"] < row["tok_s"] < row["high"] for row in told)
    offers = build._offers(prepared)
    assert [offer.name for offer in offers] == ["exact", "balanced", "fast"]
    assert offers[0].tok_s is not None
    assert offers[0].tok_s == pytest.approx(same[Phase.DECODE, 1, 128].tok_s)
    assert build._offers(tiny) == ()


def test_the_limit_of_a_step_follows_its_prediction() -> None:
    """A slower card gets more time before its engine counts as hung, and a CPU, whose times are not predicted, most."""
    limits = []
    for card in ("h200", "gb10"):
        found = report.explain(report.Question("gpt-oss-20b", card))
        shape = found.outline, found.plan, found.setup
        limits.append(step_limit_s(*shape, sequences=64, context=131072, step_tokens=2048))
        decode_s = [point.us / 1e6 for point in found.points if point.kind is Phase.DECODE and point.batch <= 64]
        assert limits[-1] >= 10 * max(decode_s)
    assert LEAST_STEP_LIMIT_S <= limits[0] < limits[1] < 60
    tiny = prepare.prepare(TINY)
    assert step_limit_s(tiny.outline, tiny.plan, tiny.setup, 4, 128, 2048) == CPU_STEP_S


def test_preparing_a_checkpoint_reads_none_of_its_weights() -> None:
    """A plan of gpt-oss-120b must not take what gpt-oss-120b takes. Shapes alone, on ``meta``, may be made."""
    made: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.device.type != "meta" and result.nbytes > 2**16:
                made.append(str(func))
            return result

    options = EngineConfig(embedded.NAME, device="cpu")
    with Watch():
        prepared = prepare.prepare(options)
        assert not made
        load(prepared)
    assert made


def test_the_callers_check_comes_before_the_plan(calls: Counter[str]) -> None:
    def check(config: ModelConfig) -> None:
        raise BadRequest(f"not with {config.num_layers} layers")

    with pytest.raises(BadRequest, match="not with 4 layers"):
        prepare.prepare(TINY, check)
    assert not calls["open_weights"]
    assert not calls["make_plan"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (structs.replace(TINY, block_size=0), BadSetting, "--block-size is 0; a page holds 1 to 1024"),
        (structs.replace(TINY, threads=0), BadSetting, "--threads 0 is not between"),
        (structs.replace(TINY, device="tpu"), BadSetting, "tpu"),
        (structs.replace(TINY, dtype="int8"), BadSetting, "Unknown dtype 'int8'"),
        (structs.replace(TINY, backend="magic"), MicroscaleError, "magic"),
    ],
    ids=["block size", "threads", "device", "dtype", "backend"],
)
def test_what_no_model_could_mend_is_refused_before_one_is_looked_for(
    options: EngineConfig, error: type[MicroscaleError], message: str, calls: Counter[str]
) -> None:
    with pytest.raises(error, match=message):
        prepare.prepare(options)
    assert not calls["open_weights"]


def test_what_does_not_fit_is_refused_with_the_words_of_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """One refusal, whoever asks: a start and ``explain`` compute with the same parts."""
    monkeypatch.setattr(hardware, "available_memory", lambda gpu, index=0: 2**30)
    monkeypatch.setattr(hardware, "detect", lambda index=0: hardware.cpu())
    asked = EngineConfig(
        "gpt-oss-20b",
        load_format="dummy",
        device="cpu",
        max_model_len=report.CONTEXT,
        max_num_seqs=1,
        max_num_batched_tokens=report.STEP_TOKENS,
    )
    with pytest.raises(Unsupported) as error:
        prepare.prepare(asked)
    told = report.explain(report.Question("gpt-oss-20b")).refusal
    assert told == str(error.value)
    assert told.startswith("gpt-oss-20b needs ")


def test_a_cpu_does_not_let_tokens_wait_for_the_next_step() -> None:
    engine = build_engine(prepare.prepare(TINY), Queueing()).engine
    engine.submit(Request("r", (1, 2, 3), SamplingParams(max_tokens=3, ignore_eos=True)))
    assert [len(engine.step()) for _ in range(3)] == [1, 1, 1]


def test_a_step_too_small_for_its_sequences_is_refused_before_the_load() -> None:
    prepared = prepare.prepare(structs.replace(TINY, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=4))
    told: list[tuple[int, int]] = []
    with pytest.raises(BadSetting, match="max_num_seqs 8 is more than max_num_batched_tokens 4"):
        build_engine(prepared, Queueing(), lambda done, total: told.append((done, total)))
    assert not told


@pytest.mark.parametrize(
    ("dtype", "want"), [("auto", Activations.FLOAT32), ("float32", Activations.FLOAT32), ("bfloat16", Activations.BF16)]
)
def test_the_setup_says_what_the_options_meant(dtype: str, want: Activations) -> None:
    prepared = prepare.prepare(structs.replace(TINY, dtype=dtype, precision="balanced"))
    assert prepared.setup.gpu.is_cpu
    assert prepared.setup.activations is want
    assert prepared.setup.precision == make_precision("balanced")
    assert prepared.memory.workload == workload_of(TINY)
