"""SM 9.0's own instructions on a CPU: ``wgmma`` and its descriptors, mbarriers, and warps with different programs."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

import pytest
from torch import Tensor

from kernels import cases_attention, cases_dense
from microscale.hardware import known
from microscale.hardware.tiles.gemm import GemmPath, possible
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import attention
from microscale.kernels.dense import gemm
from microscale.kernels.dense.packed import pack
from microscale.kernels.moe import grouped_wgmma
from microscale.kernels.small.reference import rope_and_write_kv
from microscale_lab.calls import run_attention, run_fused
from microscale_lab.cases.attention import Shape
from microscale_lab.cases.errors import assert_close, check_rounded, rms_step, step
from microscale_lab.cases.experts import ExpertsInput, ExpertsProblem
from microscale_lab.cases.fused_attention import PLAIN_HEADS, fused_bound, make_heads
from microscale_lab.tune.candidates import of_gemm
from ptxproof import TritonKernel
from ptxproof.errors import InterpretError, Race
from support.interpreted import Edit, interpreted
from support.ptx_faults import only_in, removed

pytestmark = pytest.mark.timeout(600)
GPU = replace(known("h200"), num_sms=8)
"""So that resident programs go through several items each."""


@cache
def problem(fmt: str = "mxfp4") -> ExpertsProblem:
    return ExpertsProblem.of(ExpertsInput("interpreted", 20, 2, 2, 352, 224), fmt, "cpu")


def run_experts(path: GemmPath, groups: int, edit: Edit | None = None) -> Tensor:
    given, resident = problem(f"mxfp{path.weight_bits}"), groups > 1
    tile = next(tile for tile in of_gemm(path, GPU) if tile.groups == groups)
    with interpreted(GPU.sm, edit) as ran:
        fp8 = path is GemmPath.W4A8_WGMMA
        y = grouped_wgmma.run(given.packed, given.layer.gate, given.x, given.routing, GPU, tile, fp8=fp8)
    assert any("resident" in kernel.name for kernel in ran) == resident
    return y


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_experts(groups: int) -> None:
    check_rounded(run_experts(GemmPath.W4A16_WGMMA, groups), problem().expected(), "bf16", 3)


@pytest.mark.parametrize("groups", [2, 3])
def test_mxfp8_experts(groups: int) -> None:
    """704 rows are 5.5 blocks of 128 and 3.7 of 192, 224 columns an odd number of groups: some groups of warps idle."""
    check_rounded(run_experts(GemmPath.W8A16_WGMMA, groups), problem("mxfp8").expected(), "bf16", 3)


@pytest.mark.parametrize("groups", [1, 3])
def test_experts_with_8_bit_activations(groups: int) -> None:
    check_rounded(run_experts(GemmPath.W4A8_WGMMA, groups), problem().expected(), "e4m3", 3)


def test_attention() -> None:
    spec, q, kv, batch = cases_attention.make_case(8, 1, 64, None, 16, [(0, 37)], False)
    with interpreted(GPU.sm):
        y = run_attention(PagedAttention(), spec, GPU, q, kv, batch, None)
    wanted = attention(q, kv, batch, spec, None)
    spread = float(wanted.abs().max() / wanted.square().mean().sqrt())
    assert_close(y, wanted, worst=3 * step("bf16") * spread, rms=3 * rms_step("bf16"))


def test_four_tokens_in_one_launch() -> None:
    shape: Shape = (8, 1, 64, None, 16, [(170, 4), (5, 3)])
    given = make_heads(shape, False, PLAIN_HEADS, "cpu", 0.5, verify=True)
    ours, exact = given.copy_of_kv(), given.copy_of_kv()
    with interpreted(GPU.sm) as ran:
        y = run_fused(PagedAttention(), given.spec, GPU, given.qkv, given.transform, ours, given.batch, given.sinks)
    assert [kernel.short_name for kernel in ran] == ["attend_verify"]
    q = rope_and_write_kv(given.qkv, 8, given.positions, given.transform.rope, exact, given.slots, None)
    wanted = attention(q, exact, given.batch, given.spec, given.sinks)
    bound = fused_bound(wanted)
    assert_close(y, wanted, worst=bound.worst, rms=bound.rms)


def test_dense_layer() -> None:
    given = cases_dense.make_problem("mxfp4", 20, 144, 352)
    tile = next(iter(possible(GemmPath.W4A16, GPU)))
    with interpreted(GPU.sm):
        y = gemm.run(pack(given.weights), GPU, given.x, given.residual, block_scaled=False, tile=tile)
    cases_dense.check_bf16(y, given.expected)


# ---- warps with different programs ----------------------------------------------------------------------------------


# ---- one instruction ------------------------------------------------------------------------------------------------


# ---- faults ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "which", "noticed"),
    [
        (r"bar\.sync", 0, "with no barrier between|still writing"),
        (r"cp\.async\.wait_group", 0, "still writing"),
        (r"fence\.proxy\.async", 0, r"no fence\.proxy\.async since"),
        (r"wgmma\.wait_group", 0, "wgmma|another thread reads"),
    ],
)
def test_a_missing_wait_is_noticed(pattern: str, which: int, noticed: str) -> None:
    with pytest.raises(InterpretError, match=noticed):
        run_experts(GemmPath.W4A16_WGMMA, 1, only_in("grouped_gemm", removed(pattern, which)))


def test_mbarriers_that_nobody_waits_at_are_noticed() -> None:
    def fault(kernel: TritonKernel, ptx: str) -> str:
        return re.sub(r"mbarrier\.try_wait\S* complete, [^;]*;", "setp.eq.u32 complete, 0, 0;", ptx)

    with pytest.raises(Race, match=r"never written|still writing|with no barrier between"):
        run_experts(GemmPath.W4A16_WGMMA, 3, only_in("grouped_gemm_resident", fault))
