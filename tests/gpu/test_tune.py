"""Tuning on the present GPU: a few tiles of each kernel and a few sizes of each threshold are right, timed, and written
where kernels would read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from triton import knobs

from microscale.hardware import Feature, detect
from microscale.hardware.tiles import attention, dense, experts, gemm, thresholds, tuned
from microscale.hardware.tiles.attention import HEAD_DIMS
from microscale.hardware.tiles.thresholds import ThresholdName
from microscale.hardware.tiles.tuned import Kernels
from microscale_lab.kernel_bench import timing
from microscale_lab.tune import attention as tune_attention
from microscale_lab.tune import split_kv as tune_split_kv
from microscale_lab.tune import with_mlp as tune_with_mlp
from microscale_lab.tune.compiling import compiler_for
from microscale_lab.tune.job import Bench, is_right
from microscale_lab.tune.tune import JOBS, WITH_MLP, tune

pytestmark = [
    pytest.mark.odd_shapes,
    pytest.mark.own("tiles are measured on the GPU as it is: no card is tuned by another's clocks"),
]
SECTIONS: dict[str, tuned.Section[Any, Any]] = {
    section.name: section
    for section in (
        gemm.SECTION, attention.SECTION, attention.SPLIT_SECTION, experts.SECTION, dense.SECTION, thresholds.SECTION,
    )
}  # fmt: skip
SECTIONS[WITH_MLP] = experts.SECTION
BORDERS = (Kernels.SPLIT_KV, Kernels.THRESHOLDS)
"""Rows of several figures, which stand in what was run."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", list(JOBS))
def test_a_quick_look(tmp_path: Path, kernels: str) -> None:
    gpu = detect()
    with knobs.cache.scope(), knobs.compilation.scope():  # it keeps what it compiles, as a server does
        file = tune(gpu, tmp_path, kernels=[kernels], quick=True)
    found = tuned.read(file, SECTIONS[kernels], gpu.family)
    # An MLP in the experts' launches has rows where that is faster than beside them.
    assert found or kernels == WITH_MLP
    for row in found.values():
        assert row.measured.gpu == gpu.name
        assert f"microscale tune --kernels {kernels} --quick: " in row.measured.run
        if kernels in BORDERS:
            assert row.measured.us is None
            assert " us" in row.measured.run
        else:
            assert row.measured.us is not None
            assert 0 < row.measured.us < 1e5
    if kernels == Kernels.THRESHOLDS:
        names = {
            ThresholdName.WGMMA_PAIRS,
            ThresholdName.WGMMA_TOKENS,
            ThresholdName.FP8_PAIRS,
            ThresholdName.MXFP8_RESIDENT_PAIRS,
        }
        on_wgmma = names if gpu.has(Feature.WGMMA) else set()
        on_all = {
            ThresholdName.UNPACK_TOKENS,
            ThresholdName.FEW_ROWS_PROGRAMS,
            ThresholdName.FEW_ROWS_TOKENS,
            ThresholdName.WIDEN_ROWS,
        }
        assert {key.name for key in found} == on_wgmma | on_all


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_splits_of_every_head_size(head_dim: int) -> None:
    gpu = detect()
    bench = Bench(gpu, timing.graph_us, "a test", compiler_for(gpu), lambda: None, "cuda", quick=True)
    with knobs.cache.scope(), knobs.compilation.scope():
        [row] = tune_split_kv.SplitJob(head_dim, gpu).quick().rows(bench)
    assert attention.SPLIT_SECTION.misfit(row.key, row.tile, gpu.family) is None
    assert "splits_per_sm" in row.measured.run


@pytest.mark.parametrize("case", list(attention.cases()), ids=lambda case: f"{case.work} {case.head_dim} {case.kv}")
def test_the_attention_in_use_is_right(case: attention.AttentionCase) -> None:
    """Every case that is tuned, with the tile that it has today: also those that no preset has."""
    gpu = detect()
    if reason := attention.no_kernel(case, gpu):
        pytest.skip(reason)
    problem = tune_attention.job_of(case, gpu).prepare("cuda")
    assert problem.error() <= problem.max_error
    torch.cuda.empty_cache()


@pytest.mark.parametrize("tokens", tune_with_mlp.TOKENS)
def test_an_mlp_on_two_streams_is_right(tokens: int) -> None:
    """What experts with an MLP in their launches are held against."""
    assert is_right(tune_with_mlp.LayersWithMlp.of(tokens, "cuda").problem(detect(), apart=True))
