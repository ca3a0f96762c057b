"""What ``microscale tune`` searches beyond the fastest tile of a case, without a GPU: splits, thresholds and experts
with an MLP. A clock takes the place of the card: kernels are listed and not started, and it says how long they would
take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest

from microscale.errors import MicroscaleError
from microscale.hardware import FAMILY_OF_SM, GENERIC, KNOWN, Gpu, known
from microscale.hardware.tiles import attention, dense, experts, gemm, thresholds, tuned
from microscale.hardware.tiles.attention import Heads, SplitKv
from microscale.hardware.tiles.experts import ExpertGemm
from microscale.hardware.tiles.thresholds import NEVER, ThresholdName
from microscale.hardware.tiles.tuned import Kernels, Section
from microscale.kernels.launch import Launch, taken_by
from microscale_lab.kernel_bench import moe as bench_moe
from microscale_lab.tune import attention as tune_attention
from microscale_lab.tune import crossing as tune_crossing
from microscale_lab.tune import dense as tune_dense
from microscale_lab.tune import grouped as tune_grouped
from microscale_lab.tune import job as tune_job
from microscale_lab.tune import split_kv as tune_split_kv
from microscale_lab.tune import thresholds as tune_thresholds
from microscale_lab.tune import tune as module
from microscale_lab.tune import with_mlp as tune_with_mlp
from microscale_lab.tune.crossing import Crossing, Sides, border, find_border
from microscale_lab.tune.job import Bench, TuningProblem
from microscale_lab.tune.tune import JOBS, WITH_MLP, tune

pytestmark = pytest.mark.nightly

H200 = known("h200")
Clock = Callable[[Sequence[Launch]], float]


def do_nothing(works: Iterable[Callable[[], object]]) -> None:
    """In place of compiling."""


@pytest.fixture
def on_a_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Clock], Callable[[Callable[[], object]], float]]:
    """Tuning on this machine: answers are taken for right, and a clock sees the launches of a problem."""
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "compiler_for", lambda gpu: do_nothing)
    for each in (tune_job, tune_crossing):
        monkeypatch.setattr(each, "is_right", lambda problem: True)

    def time_us(clock: Clock) -> Callable[[Callable[[], object]], float]:
        def timed(work: Callable[[], object]) -> float:
            found: list[Launch] = []

            def hear(started: Launch) -> bool:
                found.append(started)
                return False

            with taken_by(hear):
                work()
            return clock(found)

        return timed

    return time_us


def names(launches: Sequence[Launch]) -> list[str]:
    return [launch.fn.__name__ for launch in launches]


# ---- a border between two ways ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("below", "above", "place"),
    [
        ([1, 2, 4, 8], [3, 3, 3, 3], 2),
        ([1, 1, 1, 1], [3, 3, 3, 3], 4),
        ([9, 9, 9, 9], [3, 3, 3, 3], 0),
        # A tie, within 2 %, leaves the size to the way below.
        ([1, 3, 3.05, 8], [3, 3, 3, 3], 3),
        ([1, 3, 3.1, 8], [3, 3, 3, 3], 2),
        # The clock went astray at the first size, and at the last: neither moves the border.
        ([4, 1, 1, 8, 8, 8], [3, 3, 3, 3, 3, 3], 3),
        ([1, 1, 1, 8, 8, 2.5], [3, 3, 3, 3, 3, 3], 3),
        # What is wrong, or cannot be built, is never taken.
        ([1, 1, inf, 1], [3, 3, 3, 3], 2),
        ([9, 9, 9, 9], [3, inf, 3, 3], 2),
    ],
)
def test_the_border_that_loses_least(below: list[float], above: list[float], place: int) -> None:
    assert border([[pair] for pair in zip(below, above, strict=True)]) == place


def test_cases_of_a_size_count_together() -> None:
    # Two formats of which one gains 10 % and the other loses 50 %.
    assert border([[(1.0, 2.0), (1.0, 2.0)], [(1.1, 1.0), (1.0, 1.5)], [(9.0, 1.0), (9.0, 1.0)]]) == 2
    assert border([[(1.0, inf)], [(inf, 1.0)], [(1.0, inf)]]) is None


def test_both_ways_take_turns_and_are_checked() -> None:
    order: list[str] = []

    def problem(name: str, error: float, us: Sequence[float]) -> TuningProblem:
        times = iter(us)

        def work() -> float:
            order.append(name)
            return next(times)

        return TuningProblem(work, lambda: error, 0.1)

    def clock(work: Callable[[], object]) -> float:
        us = work()
        assert isinstance(us, float)
        return us

    bench = Bench(H200, clock, "tune", do_nothing, lambda: None, "cpu")
    # One turn went astray; the median does not.
    sides = [Sides(problem("a", 0.0, [2.0, 9.0, 2.0]), problem("b", 0.0, [3.0, 3.0, 1.0]))]
    crossing = Crossing("a test", "tokens", "this", "that", (16,), lambda device, size: sides)
    found = find_border(crossing, bench)
    assert order == ["a", "b"] * 3
    assert (found.last_below, found.first_above) == (16, None)
    assert found.text == "a test: at 16 tokens this 2.0 us, that 3.0"
    wrong = Sides(problem("a", 0.2, []), problem("b", 0.0, [3.0, 3.0, 3.0]))
    found = find_border(replace(crossing, prepare=lambda device, size: [wrong]), bench)
    assert (found.last_below, found.first_above) == (None, 16)
    wrong = Sides(problem("a", 0.2, []), problem("b", float("nan"), []))
    with pytest.raises(MicroscaleError, match="Neither this nor that is right on NVIDIA H200: a test"):
        find_border(replace(crossing, prepare=lambda device, size: [wrong]), bench)


# ---- split-KV --------------------------------------------------------------------------------------------------------


@pytest.fixture
def _short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_attention, "LAYERS_IN_A_GRAPH", 1)
    monkeypatch.setattr(tune_split_kv, "DECODE_SEQUENCES", 2)
    monkeypatch.setattr(tune_split_kv, "DECODE_CONTEXT", 512)
    monkeypatch.setattr(tune_split_kv, "SPLITS", (2, 4, 8))
    monkeypatch.setattr(tune_split_kv, "SPLIT_SEQUENCES", (1,))
    monkeypatch.setattr(tune_split_kv, "SEQUENCES", (1, 2, 4, 8))
    monkeypatch.setattr(tune_split_kv, "FUSED_CONTEXT", 64)


SEQUENCES, WANTED, LEAST = 14, 18, 19
"""Of a launch's arguments: the batch, splits of all keys of a KV head, and blocks of a split."""


def decoding(gpu: Gpu) -> Clock:
    """A card on which an SM works on three splits and a split has 256 keys, where adding up inside costs as much as
    the splits are, a merge five, and decode from the projection grows with the square of the sequences."""

    def clock(launches: Sequence[Launch]) -> float:
        us = 0.0
        for launch in launches:
            name = launch.fn.__name__
            if name in ("attend_short", "attend_fused"):
                keys = launch.arguments[LEAST] * launch.constants["BLOCK_N"]
                us += 10 + 10 * abs(keys.bit_length() - (256).bit_length())
                # Of one sequence, programs are splits.
                us += launch.grid[0] if launch.constants["INSIDE"] and launch.arguments[SEQUENCES] == 1 else 0
            if name == "attend_short":
                us += abs(launch.arguments[WANTED] * launch.grid[1] / gpu.num_sms - 3)
            if name == "attend_fused":
                us += launch.arguments[0].shape[0] ** 2 / 4
            us += {"merge_splits": 5, "rope_and_write_kv": 3}.get(name, 0)
        return us

    return clock


@pytest.mark.usefixtures("_short_contexts")
@pytest.mark.parametrize(("name", "fused"), [("h200", 2), ("b200", 2), ("a100", 0)])
def test_splits(tmp_path: Path, name: str, fused: int, on_a_clock: Any) -> None:
    """Four figures of each head size, whether or not the family has rows; without an instruction no fused decode."""
    gpu = known(name)
    file = tune(gpu, tmp_path, kernels=[Kernels.SPLIT_KV], time_us=on_a_clock(decoding(gpu)))
    found = tuned.read(file, attention.SPLIT_SECTION, gpu.family)
    assert list(found) == [Heads(head_dim, kv) for head_dim in attention.HEAD_DIMS for kv in attention.Kv]
    for row in found.values():
        assert row.tile == SplitKv(splits_per_sm=3, least_keys=256, merged_inside=4, fused_sequences=fused)
        said = row.measured.run
        assert said.startswith("microscale tune --kernels split_kv: ")
        assert "splits_per_sm 3" in said
        assert "at 4 splits in one launch" in said
        assert ("at 2 sequences in one launch" in said) == bool(fused)


def test_a_window_bounds_the_splits() -> None:
    """Gemma 4's window of 1024 keys is at most 33 blocks of 32: more splits cannot be, and are not measured."""
    job = tune_split_kv.SplitJob(256, H200)
    sizes = job._merges(attention.split_kv(256, H200)).sizes
    assert sizes[-1] == 33
    assert 48 not in sizes
    assert tune_split_kv.SplitJob(512, H200)._merges(attention.split_kv(512, H200)).sizes == tune_split_kv.SPLITS


# ---- thresholds ------------------------------------------------------------------------------------------------------


@pytest.fixture
def _small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = {name: replace(layer, hidden=256, intermediate=256) for name, layer in bench_moe.LAYERS.items()}
    shape = tune_grouped.GroupedShape(8, 256, 256)
    monkeypatch.setattr(bench_moe, "LAYERS", layers)
    monkeypatch.setattr(tune_grouped, "GroupedShape", lambda: shape)
    for each in (tune_thresholds, tune_dense):
        monkeypatch.setattr(each, "ROTATED_BYTES", 1)
    monkeypatch.setattr(tune_thresholds, "UNPACK_SHAPE", (64, 128))
    monkeypatch.setattr(tune_thresholds, "FEW_ROWS_COLUMNS", 32)
    monkeypatch.setattr(tune_thresholds, "FEW_ROWS_PROGRAMS", (2, 5, 6))
    monkeypatch.setattr(tune_thresholds, "FEW_ROWS_TOKENS", (32, 64, 96))
    monkeypatch.setattr(tune_thresholds, "CROWD_PAIRS", (4, 6, 8, 12))
    monkeypatch.setattr(tune_thresholds, "WIDEN_ROWS", (64, 128, 256))
    monkeypatch.setattr(tune_thresholds, "WIDEN_CONTEXT", 256)
    monkeypatch.setattr(tune_attention, "LAYERS_IN_A_GRAPH", 1)


def both_ways(launches: Sequence[Launch]) -> float:
    """A card with borders of its own; see the test."""
    first, started = launches[0], names(launches)
    if started[-1] == "rms_norm":
        assert (launches[-1].constants["TOP_K"] > 0) == ("combine" not in started)
        return 50 if "combine" in started else 2 * launches[-1].grid[0]
    if "list_small_batch" in started:
        pairs, num_experts = first.arguments[6], first.arguments[8]
        if "grouped_gemm" in started:
            return 70
        # Twice as slow for each expert that has more pairs; few experts by tokens.
        few = num_experts == tune_thresholds.FEW_EXPERTS
        return float(3 * pairs / 4 if few else 10 * pairs / num_experts)
    if "widen" in started:
        assert not launches[started.index("attend_long")].constants["KV_FP8"]
        return 200
    if "attend_long" in started:
        assert first.constants["KV_FP8"]
        spec = first.arguments[0].shape
        return float(spec[0] * spec[1] / first.grid[1])
    if "prepare_tokens_fp8" in started:
        return 100
    if "grouped_gemm_resident" in started and launches[started.index("grouped_gemm_resident")].constants["BITS"] == 8:
        return 90
    if started[-1] == "combine" and "gate_up" in started:
        return 4 * launches[-1].grid[0] * 4 / 8
    if "prepare_tokens" in started:
        return 5 * launches[started.index("combine")].grid[0] * 4 / 8
    if "unpack" in started:
        return 200
    if started == ["gemm"]:
        tokens, rows = first.arguments[0].shape[0], first.arguments[7].shape[1]
        return float(tokens) if rows == 64 else 5.05 * H200.num_sms
    assert started == ["small_batch"]
    tokens = first.arguments[0].shape[0]
    return float(first.grid[0] * first.grid[1] * first.constants["B"] + (1000 if tokens > 64 else 0))


@pytest.mark.usefixtures("_small_layers")
def test_thresholds(tmp_path: Path, on_a_clock: Any) -> None:
    file = tune(H200, tmp_path, kernels=[Kernels.THRESHOLDS], time_us=on_a_clock(both_ways))
    rows = tuned.read(file, thresholds.SECTION, H200.family)
    found = {key.name: row.tile.value for key, row in rows.items()}
    assert found == {
        ThresholdName.WGMMA_PAIRS: 8,  # 10 us a pair: 61 at 256 pairs of 42 experts, 80 at 8
        ThresholdName.WGMMA_TOKENS: 24,  # 3 us a token: 48 at 16, 72 at 24
        ThresholdName.FP8_PAIRS: 20,  # 5 us a pair: a tie at 20, which bf16 keeps
        ThresholdName.MXFP8_RESIDENT_PAIRS: 24,  # 4 us a pair: 64 at 16, 96 at 24
        ThresholdName.SUM_IN_NORM_TOKENS: 24,  # 2 us a token: 48 at 24, 64 at 32
        ThresholdName.UNPACK_TOKENS: 256,  # 1 us a token: 192 and 256
        ThresholdName.FEW_ROWS_PROGRAMS: 5,
        ThresholdName.FEW_ROWS_TOKENS: 64,
        ThresholdName.WIDEN_ROWS: 256,  # 1 us a row: 128 and 256
    }
    said = rows[thresholds.Key(ThresholdName.WGMMA_PAIRS)].measured
    assert "at 6 pairs an expert small batch 61.0 us, wgmma 70.0; at 8 pairs an expert small batch 80.0" in said.run
    assert said.gpu == "NVIDIA H200"
    assert "8 experts" in rows[thresholds.Key(ThresholdName.WGMMA_TOKENS)].measured.run
    # Few tokens of few experts are fewer pairs than pay: they are not measured.
    assert [size for size in tune_thresholds.crowd_tokens(H200).crossing(found).sizes if size < 16] == []


@pytest.mark.usefixtures("_small_layers")
def test_thresholds_of_a_way_that_never_pays(tmp_path: Path, on_a_clock: Any) -> None:
    """And a card without wgmma has no row about it."""

    def clock(launches: Sequence[Launch]) -> float:
        if names(launches)[-1] == "rms_norm":
            return 8.0 if "combine" in names(launches) else 9.0
        return {"unpack": 900.0, "gemm": 10.0, "small_batch": 99.0, "widen": 9.0, "attend_long": 8.0}[
            names(launches)[0]
        ]

    gpu = known("a100")
    file = tune(gpu, tmp_path, kernels=[Kernels.THRESHOLDS], time_us=on_a_clock(clock))
    rows = tuned.read(file, thresholds.SECTION, gpu.family)
    assert {key.name: row.tile.value for key, row in rows.items()} == {
        ThresholdName.SUM_IN_NORM_TOKENS: 1,  # fewer than a list has
        ThresholdName.UNPACK_TOKENS: NEVER,
        ThresholdName.FEW_ROWS_PROGRAMS: 1,
        ThresholdName.FEW_ROWS_TOKENS: 16,  # no more than what takes these kernels anyway
        ThresholdName.WIDEN_ROWS: NEVER,
    }


# ---- experts with an MLP ---------------------------------------------------------------------------------------------


@pytest.fixture
def _small_mlp(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = replace(bench_moe.LAYERS[tune_with_mlp.MODEL], num_experts=8, hidden=512, intermediate=480)
    monkeypatch.setattr(bench_moe, "LAYERS", {tune_with_mlp.MODEL: layer})
    monkeypatch.setattr(tune_with_mlp, "mlp_units", lambda: 256)
    monkeypatch.setattr(tune_with_mlp, "NUM_LAYERS", 1)


def with_an_mlp(apart: float) -> Clock:
    """A card that likes three tiles ahead in 168 registers, two slices for one token and one for two."""

    def clock(launches: Sequence[Launch]) -> float:
        if names(launches) != ["gate_up_with_mlp", "down_with_mlp"]:
            assert {"gate_up_small", "down_direct", "small_batch", "gated"} == set(names(launches))
            return apart
        us = 10.0
        for launch in launches:
            us += abs(launch.constants["AHEAD"] - 3) + abs(launch.options["maxnreg"] - 168)
        tokens = launches[0].arguments[-1]
        return us + float(abs(launches[0].constants["SLICES"] - (2 if tokens == 1 else 1)))

    return clock


@pytest.mark.usefixtures("_small_mlp")
@pytest.mark.parametrize("name", ["h200", "b200"])
def test_experts_with_an_mlp(tmp_path: Path, name: str, on_a_clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = known(name)
    file = tune(gpu, tmp_path, kernels=[WITH_MLP], time_us=on_a_clock(with_an_mlp(apart=20.0)))
    rows = tuned.read(file, experts.SECTION, gpu.family)
    assert {(row.key.gemm, row.tile) for row in rows.values()} == {
        (ExpertGemm.GATE_UP_WITH_MLP, experts.ExpertTile(1, 1, 2, 3, 168)),
        (ExpertGemm.GATE_UP_WITH_MLP, experts.ExpertTile(1, 1, 1, 3, 168)),
        (ExpertGemm.DOWN_WITH_MLP, experts.ExpertTile(1, 1, 1, 3, 168)),
    }
    assert all("on two streams 20.0 us" in row.measured.run for row in rows.values())
    # The rows serve what was measured.
    monkeypatch.setattr(tuned, "TUNED_DIR", tmp_path)
    tuned.forget()
    for tokens, slices in ((1, 2), (2, 1)):
        load = tokens * 8 * 2 * 480 // 16 + 2 * 256 // 16
        tile = experts.with_mlp(ExpertGemm.GATE_UP_WITH_MLP, tokens, 8, load, gpu)
        assert tile is not None
        assert tile.slices == slices
    assert experts.with_mlp_slices(gpu) == {1, 2}
    tuned.forget()


@pytest.mark.usefixtures("_small_mlp")
def test_an_mlp_beside_the_experts_that_is_faster_stays_there(tmp_path: Path, on_a_clock: Any) -> None:
    gpu = known("b200")
    file = tune(gpu, tmp_path, kernels=[WITH_MLP], time_us=on_a_clock(with_an_mlp(apart=5.0)))
    assert not tuned.read(file, experts.SECTION, gpu.family)
    # Earlier rows go, and no others.
    file = tmp_path / "sm90.json"
    file.write_text((tuned.TUNED_DIR / "sm90.json").read_text())
    before = tuned.read(file, experts.SECTION, H200.family)
    tune(H200, tmp_path, kernels=[WITH_MLP], time_us=on_a_clock(with_an_mlp(apart=5.0)))
    after = tuned.read(file, experts.SECTION, H200.family)
    assert after == {key: row for key, row in before.items() if key.gemm not in experts.WITH_MLP}
    assert len(after) == len(before) - 3


# ---- all that is tuned -----------------------------------------------------------------------------------------------

BY_HAND: Mapping[Kernels, set[Any]] = {}
"""Keys that no tuner writes. Each that is put here is explained in docs/adding_a_gpu.md."""


def kind(key: Any) -> Any:
    """A key without its bounds, which follow from the sizes that were measured."""
    bounds = {"up_to", "tokens", "top_k_from"}
    return tuple(getattr(key, field.name) for field in fields(key) if field.name not in bounds)


def all_kinds() -> dict[Kernels, set[Any]]:
    """All that a file may hold."""
    pairs = set(product(ExpertGemm, (4, 8))) - set(product(experts.WITH_MLP, (4,)))
    return {
        Kernels.GROUPED_GEMM: {(path,) for path in gemm.GemmPath},
        Kernels.ATTENTION: {kind(case) for case in attention.cases()},
        Kernels.SPLIT_KV: set(product(attention.HEAD_DIMS, attention.Kv)),
        Kernels.SMALL_BATCH_EXPERTS: pairs,
        Kernels.SMALL_BATCH_DENSE: {
            (fmt, columns, size)
            for fmt in dense.DenseFormat
            for columns in dense.columns_of(fmt)
            for size in dense.sizes_of(columns)
        },
        Kernels.THRESHOLDS: {(name,) for name in ThresholdName},
    }


def written(gpu: Gpu) -> dict[Kernels, set[Any]]:
    """The keys that a whole run writes on a card."""
    found: dict[Kernels, set[Any]] = {name: set() for name in Kernels}
    for of_kernel in JOBS.values():
        for search in of_kernel(gpu, False):
            found[search.section.name] |= set(search.keys)
    return found


def test_all_that_a_file_may_hold_is_tuned() -> None:
    """Each key is written by a tuner on some card, or is in the list of those by hand."""
    everywhere: dict[Kernels, set[Any]] = {name: set() for name in Kernels}
    for gpu in KNOWN.values():
        for name, keys in written(gpu).items():
            everywhere[name] |= {kind(key) for key in keys}
    for name, kinds in all_kinds().items():
        assert kinds - everywhere[name] == BY_HAND.get(name, set()), name
        assert everywhere[name] <= kinds


def test_a_key_outside_of_the_list_is_refused() -> None:
    """What ``all_kinds`` leaves out cannot stand in a file."""
    four_bits = experts.ExpertCase(ExpertGemm.DOWN_WITH_MLP, 4, 2, 1, 1.0)
    reason = experts.SECTION.misfit(four_bits, experts.ExpertTile(1, 1, 1, 2, 128), H200.family)
    assert reason is not None
    assert "with an MLP there are kernels for 8" in reason
    reason = attention.SPLIT_SECTION.misfit(Heads(96, attention.Kv.BF16), SplitKv(1, 64, 0, 0), H200.family)
    assert reason is not None
    assert "heads of 96" in reason
    reason = attention.SPLIT_SECTION.misfit(Heads(64, attention.Kv.BF16), SplitKv(0, 64, 0, 0), H200.family)
    assert reason is not None
    assert "too small" in reason


def test_every_shipped_row_would_be_measured_again() -> None:
    """A run on a card of the family replaces each of its rows."""
    families = {family.name: family for family in (*FAMILY_OF_SM.values(), GENERIC)}
    sections: tuple[Section[Any, Any], ...] = (
        gemm.SECTION, attention.SECTION, attention.SPLIT_SECTION, experts.SECTION, dense.SECTION, thresholds.SECTION,
    )  # fmt: skip
    for file in tuned.TUNED_DIR.glob("*.json"):
        gpu = next(gpu for gpu in KNOWN.values() if gpu.family is families[file.stem])
        found = written(gpu)
        for section in sections:
            for key in tuned.read(file, section, gpu.family):
                if section is gemm.SECTION:
                    assert kind(key) in {kind(other) for other in found[section.name]}
                else:
                    assert key in found[section.name] | BY_HAND.get(section.name, set())


def test_what_was_found_is_used_for_what_comes_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thresholds are measured with the tiles that the same run has found, and nothing of it stays behind."""
    case = attention.AttentionCase(attention.AttentionWork.DECODE, 64, attention.Kv.BF16)
    before, tile = attention.choose(case, H200), attention.AttentionTile(16, 32, 8, 2)
    seen = []

    def first(gpu: Gpu, quick: bool) -> list[tune_job.TileSearch]:
        return [tune_job.TileSearch(attention.SECTION, case, "a case", [tile], lambda device: problem)]

    def second(gpu: Gpu, quick: bool) -> list[tune_job.TileSearch]:
        seen.append(attention.choose(case, gpu))
        return []

    problem = TuningProblem(lambda: None, lambda: 0.0, 1.0)
    monkeypatch.setattr(module, "JOBS", {Kernels.ATTENTION: first, Kernels.THRESHOLDS: second})
    tune(H200, tmp_path, kernels=list(module.JOBS), time_us=lambda work: 1.0)
    assert seen == [tile]
    assert attention.choose(case, H200) == before != tile
