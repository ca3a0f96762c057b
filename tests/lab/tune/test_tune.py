"""Tuning without a GPU: what is measured, what is kept, what is written, and that a candidate reaches its kernel. The
measuring itself runs on a card (``tests/gpu/test_tune.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from microscale.errors import BadSetting, MicroscaleError, Unsupported
from microscale.hardware import Gpu, cpu, known
from microscale.hardware.cards import SM90
from microscale.hardware.tiles import attention, dense, experts, gemm, thresholds, tuned
from microscale.hardware.tiles.experts import ExpertGemm
from microscale.hardware.tiles.gemm import BUSY_PAIRS, GemmPath
from microscale.hardware.tiles.tuned import Kernels, Section, trial
from microscale.kernels.launch import recording
from microscale.kernels.moe import reference
from microscale_lab.kernel_bench import attention as bench_attention
from microscale_lab.kernel_bench import dense as bench_dense
from microscale_lab.kernel_bench import moe as bench_moe
from microscale_lab.tune import attention as tune_attention
from microscale_lab.tune import dense as tune_dense
from microscale_lab.tune import experts as tune_experts
from microscale_lab.tune import grouped as tune_grouped
from microscale_lab.tune import job as tune_job
from microscale_lab.tune import tune as module
from microscale_lab.tune.grouped import GATE, GroupedShape, jobs_of, make_experts, make_tokens, runnable
from microscale_lab.tune.job import TileSearch, TuningProblem, measure, together
from microscale_lab.tune.tune import JOBS, WITH_MLP, parse_kernels, tune

H200 = known("h200")


def nearest_is_fastest() -> float:
    """A card on which the tile nearest to the share is the fastest. The one on trial is the first of all."""
    row = next(iter(tuned.measured(gemm.SECTION, SM90).values()))
    share = min(row.key.up_to, 128)
    return abs(row.tile.block_m - share) + row.tile.stages + 10 * (row.tile.block_n == 64) + row.tile.warps


def its_answer(work: Callable[[], object]) -> float:
    """A clock for work that says itself how long it takes."""
    us = work()
    assert isinstance(us, float | int)
    return us


@pytest.fixture
def _no_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases without tensors, of grouped GEMMs in one path."""
    problem = TuningProblem(nearest_is_fastest, lambda: 0.0, 1.0)

    def some(gpu: Gpu, quick: bool) -> Iterator[TileSearch]:
        for job in jobs_of(GemmPath.W8A16, gpu, (8, 64, 192, 768), GroupedShape()):
            yield replace(job, prepare=lambda device: problem)

    monkeypatch.setattr(module, "JOBS", {**JOBS, Kernels.GROUPED_GEMM: some})


@pytest.mark.usefixtures("_no_problems")
def test_the_fastest_tile_of_each_share_is_written(tmp_path: Path) -> None:
    file = tune(H200, tmp_path, kernels=[Kernels.GROUPED_GEMM], time_us=its_answer)
    assert file.name == "sm90.json"
    rows = list(tuned.read(file, gemm.SECTION, SM90).values())
    # Shares of 8, 64, 192 and 768 end at 23, 111, 384 and nowhere; the last three take the same tile.
    assert [(row.key.up_to, row.tile.block_m) for row in rows] == [(23, 16), (BUSY_PAIRS, 128)]
    assert {row.tile.stages for row in rows} == {2}
    assert {row.measured.gpu for row in rows} == {"NVIDIA H200"}
    assert all("microscale tune --kernels grouped_gemm: w8a16, 128 experts" in row.measured.run for row in rows)


@pytest.mark.usefixtures("_no_problems")
def test_what_is_not_measured_stays(tmp_path: Path) -> None:
    file = tmp_path / "sm90.json"
    file.write_text((tuned.TUNED_DIR / "sm90.json").read_text())
    before = {row.key: row for row in tuned.read(file, gemm.SECTION, SM90).values()}
    tune(H200, tmp_path, kernels=[Kernels.GROUPED_GEMM], time_us=its_answer)
    after = tuned.read(file, gemm.SECTION, SM90)
    assert {key: row for key, row in after.items() if key.path is not GemmPath.W8A16} == {
        key: row for key, row in before.items() if key.path is not GemmPath.W8A16
    }
    assert {row.measured.date for key, row in after.items() if key.path is GemmPath.W8A16} != {"2026-11-15"}
    others: list[Section[Any, Any]] = [
        attention.SECTION, attention.SPLIT_SECTION, experts.SECTION, dense.SECTION, thresholds.SECTION,
    ]  # fmt: skip
    for section in others:
        shipped = tuned.read(tuned.TUNED_DIR / "sm90.json", section, SM90)
        assert tuned.read(file, section, SM90) == shipped


@pytest.mark.parametrize(
    ("kernels", "section"),
    [
        (Kernels.ATTENTION, attention.SECTION),
        (Kernels.SMALL_BATCH_EXPERTS, experts.SECTION),
        (Kernels.SMALL_BATCH_DENSE, dense.SECTION),
    ],
)
def test_every_kernel_is_written_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels, section: Any
) -> None:
    """A made-up card that prefers the last candidate, of a family with rows and of one without: each case gets a row
    that serves it."""

    def jobs(gpu: Gpu, quick: bool) -> list[TileSearch]:
        found = JOBS[kernels](gpu, quick)
        return [replace(job, prepare=lambda device: later) for job in found if isinstance(job, TileSearch)]

    monkeypatch.setattr(module, "JOBS", {**JOBS, kernels: jobs})
    calls = iter(range(1 << 20))
    later = TuningProblem(lambda: 1e6 - next(calls), lambda: 0.0, 1.0)
    for gpu in (H200, known("b200")):
        wanted = jobs(gpu, False)
        file = tune(gpu, tmp_path, kernels=[kernels], time_us=its_answer)
        found = tuned.read(file, section, gpu.family)
        for job in wanted:
            assert found[job.key].tile == job.tiles[-1]
            assert job.about in found[job.key].measured.run
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tuned, "TUNED_DIR", tmp_path)
            tuned.forget()
            # A second run replaces the rows of the first.
            assert [job.key for job in jobs(gpu, False)] == [job.key for job in wanted]
        tuned.forget()


@pytest.mark.usefixtures("_no_problems")
def test_a_card_on_which_nothing_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_job, "is_right", lambda problem: False)
    with pytest.raises(MicroscaleError, match="No tile of grouped_gemm gave a right answer"):
        tune(H200, tmp_path, kernels=[Kernels.GROUPED_GEMM], time_us=its_answer)
    assert not list(tmp_path.iterdir())


def test_a_wrong_answer_has_no_time() -> None:
    wrong = TuningProblem(lambda: None, lambda: 0.3, max_error=0.2)
    assert measure(wrong, lambda work: 1.0) == float("inf")
    assert measure(replace(wrong, error=lambda: float("nan")), lambda work: 1.0) == float("inf")
    assert measure(replace(wrong, error=lambda: 0.1, calls=4), lambda work: 2.0) == 0.5

    def fails() -> float:
        raise RuntimeError("PassManager::run failed")

    assert measure(replace(wrong, error=fails), lambda work: 1.0) == float("inf")

    def broken() -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure(replace(wrong, error=broken), lambda work: 1.0)


def test_a_machine_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="needs a GPU"):
        tune(cpu(), tmp_path)


def test_a_quick_look_does_not_replace_measured_tiles() -> None:
    with pytest.raises(BadSetting, match="--directory"):
        tune(H200, quick=True)


def test_kernels_by_name() -> None:
    assert parse_kernels(None) == list(JOBS)
    # Splits and thresholds come after the tiles, however they were asked for.
    assert parse_kernels("thresholds, split_kv,attention") == [Kernels.ATTENTION, Kernels.SPLIT_KV, Kernels.THRESHOLDS]
    assert parse_kernels("experts_with_mlp") == [WITH_MLP]
    with pytest.raises(BadSetting, match="'sampling' is not tuned; known are grouped_gemm, attention, split_kv"):
        parse_kernels("sampling")


@pytest.mark.parametrize("name", ["h200", "a100", "gb10", "b200"])
def test_quick_is_few_tiles(name: str) -> None:
    """Three minutes, most of it compiling: 16 cores compile a case's tiles at once."""
    searches = [search.quick() for of_kernel in JOBS.values() for search in of_kernel(known(name), True)]
    assert {search.section.name for search in searches} == set(Kernels)
    assert len(searches) <= 20
    assert sum(search.steps for search in searches) <= 80


def test_block_scaled_paths_need_the_instruction() -> None:
    assert runnable(H200) == [GemmPath.W4A16_WGMMA, GemmPath.W4A8_WGMMA, GemmPath.W8A16, GemmPath.W8A16_WGMMA]
    assert runnable(known("gb10")) == [path for path in GemmPath if not path.wgmma]


@pytest.mark.parametrize("path", list(GemmPath))
def test_the_layer_that_is_timed_has_ordinary_numbers(path: GemmPath) -> None:
    layer = make_experts(GroupedShape(num_experts=4, hidden=256, intermediate=256), path, device="cpu")
    x, routing = make_tokens(layer, share=4)
    y = reference.moe(x, layer, routing, GATE)
    assert x.shape == y.shape == (4, 256)
    assert 0.05 < float(y.square().mean().sqrt()) < 50


# ---- a candidate reaches its kernel ----------------------------------------------------------------------------------


def started(job: TileSearch, tile: Any) -> list[Any]:
    """The kernels that a job starts with a tile on trial; nothing runs."""
    problem = job.prepare("cpu")
    with trial(job.section, H200.family, job.key, tile), recording() as found:
        problem.work()
    return list(found)


def test_tiles_of_attention_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_attention, "DECODE_CONTEXT", 256)
    monkeypatch.setattr(tune_attention, "PREFILL", 64)
    monkeypatch.setattr(tune_attention, "LAYERS_IN_A_GRAPH", 1)
    names = dict.fromkeys(("decode", "decode_32", "decode_64"), "attend_short")
    names |= {"fused_decode": "attend_fused", "fused_verify": "attend_verify"}
    seen = set()
    for job in tune_attention.jobs(H200, quick=False):
        tile = next(tile for tile in job.tiles[2:] if tile.registers is not None)
        kernels = started(job, tile)
        [kernel] = [k for k in kernels if k.short_name == names.get(job.key.work, "attend_long")]
        sizes = (kernel.constants["BLOCK_M"], kernel.constants["BLOCK_N"])
        options = dict(kernel.options)
        assert (*sizes, options["num_warps"], options["num_stages"], options["maxnreg"]) == (
            tile.block_m, tile.block_n, tile.warps, tile.stages, tile.registers
        )  # fmt: skip
        assert kernel.constants.get("KV_FP8", False) == (job.key.kv is attention.Kv.FP8)
        assert kernel.constants["HEAD_DIM"] == job.key.head_dim
        seen.add(job.key)
    assert seen == {case for case in attention.cases() if attention.no_kernel(case, H200) is None}


def test_tiles_of_experts_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tune_experts.layer_of

    def small(name: str) -> bench_moe.ExpertLayer:
        return replace(real(name), num_experts=16, hidden=512, intermediate=512)

    monkeypatch.setattr(tune_experts, "layer_of", small)
    monkeypatch.setattr(tune_experts, "NUM_LAYERS", 1)
    of = {
        ExpertGemm.GATE_UP_DIRECT: {"gate_up_small"},
        ExpertGemm.DOWN_DIRECT: {"down_direct"},
        ExpertGemm.GATE_UP_LIST: {"gate_up_small"},
        ExpertGemm.DOWN_LIST: {"down_small"},
    }
    for job in tune_experts.jobs(H200, quick=False):
        tile = next(tile for tile in job.tiles[1:] if tile.registers == 128 and tile.ahead == 3)
        kernels = [k for k in started(job, tile) if k.short_name in of[job.key.gemm]]
        assert {k.short_name for k in kernels} == of[job.key.gemm]
        for kernel in kernels:
            sizes = [kernel.constants[name] for name in ("B", "WARPS_N", "SLICES", "AHEAD")]
            assert sizes == [tile.row_tiles, tile.warps_n, tile.slices, tile.ahead]
            assert dict(kernel.options)["maxnreg"] == 128


def test_tiles_of_dense_layers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_dense, "ROTATED_BYTES", 1)
    monkeypatch.setattr(tune_dense, "COLUMNS", 128)
    for job in tune_dense.jobs(H200, quick=False):
        if job.key.size is dense.Size.MANY:
            continue  # the same, in gigabytes
        [kernel] = started(job, job.tiles[-1])
        tile = job.tiles[-1]
        sizes = [kernel.constants[name] for name in ("N", "B", "WARPS_N", "SLICES", "AHEAD")]
        assert sizes == [tile.columns, tile.row_tiles, tile.warps_n, tile.slices, tile.ahead]
        assert dict(kernel.options)["maxnreg"] == tile.registers
    assert tune_dense.rows_of(dense.Size.MANY, H200) == bench_dense.SHAPES[-1].rows


def test_tiles_of_grouped_gemms_are_tried() -> None:
    for path in (GemmPath.W4A16_WGMMA, GemmPath.W8A16, GemmPath.W8A16_WGMMA):
        [job] = tune_grouped.jobs_of(path, H200, (32,), GroupedShape(num_experts=4, hidden=256, intermediate=256))
        tile = job.tiles[1]
        gemms = [
            k
            for k in started(job, tile)
            if k.short_name in ("grouped_gemm", "grouped_gemm_resident", "gate_up", "down")
        ]
        assert gemms
        for kernel in gemms:
            name = "BN" if path.wgmma else "BLOCK_M"
            assert (kernel.constants[name], kernel.constants["STAGES"]) == (tile.block_m, tile.stages)


def test_the_answer_of_the_references_is_the_attention_of_the_new_heads() -> None:
    """At a context of one token attention gives the value itself, in every head of its group."""
    made = tune_attention.FromHeads.of(bench_attention.AttentionInput(bench_attention.SINKS_FULL, 2, 1), "cpu")
    heads = replace(made, spec=replace(made.spec, sinks=False), sinks=None)
    group, kv_heads = heads.spec.num_heads // heads.spec.num_kv_heads, heads.spec.num_kv_heads
    values = heads.qkv[:, -kv_heads:].repeat_interleave(group, dim=1)
    torch.testing.assert_close(heads.answer().float(), values.float(), atol=1e-5, rtol=1e-5)


def test_prefill_has_the_window_of_its_key() -> None:
    for work, head_dim in product(
        (attention.AttentionWork.PREFILL, attention.AttentionWork.PREFILL_WINDOW), attention.HEAD_DIMS
    ):
        spec = tune_attention.case_of(attention.AttentionCase(work, head_dim, attention.Kv.BF16), known("h200")).spec
        assert (spec.head_dim, spec.window is not None) == (head_dim, work is attention.AttentionWork.PREFILL_WINDOW)


def test_problems_together() -> None:
    right, wrong = TuningProblem(lambda: 1, lambda: 0.1, 0.2, 4), TuningProblem(lambda: 2, lambda: float("nan"), 0.3, 4)
    both = together([right, replace(right, work=lambda: 3)])
    assert both.work() == [1, 3]
    assert (both.error(), both.max_error, both.calls) == (0.1, 0.2, 4)
    assert measure(together([right, wrong]), lambda work: 1.0) == float("inf")
    assert measure(together([wrong, right]), lambda work: 1.0) == float("inf")
