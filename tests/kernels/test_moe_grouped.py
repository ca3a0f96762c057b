"""The grouped expert kernels: what runs without the interpreter, and the run under it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from microscale.hardware import KNOWN, Feature, Gpu, known
from microscale.kernels.launch import Kernel, recording
from microscale.kernels.moe import grouped, grouped_wgmma
from microscale.kernels.moe.narrow_activations import BlockScaledMoe, TritonW4A8, TritonW8A8
from microscale.kernels.moe.packed import pack_experts
from microscale.kernels.moe.spec import Activations, MoeSpec, Routing
from microscale.kernels.op import MatrixUnit
from microscale.planning.shards import shape_only
from microscale_lab.calls import run_moe
from microscale_lab.cases.experts import GELU, SILU, SWIGLU, ExpertsInput, ExpertsProblem
from support.interpreter import first_and_all, run_cases


@first_and_all
def test_under_the_interpreter(which: str) -> None:
    run_cases("cases_moe_grouped.py", which, beside=__file__)


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_block_scaling_is_promised_where_the_card_has_it(fmt: str, gpu: Gpu) -> None:
    spec = replace(spec_of(fmt), num_experts=4, hidden=256, intermediate=256)
    packed = pack_experts(shape_only(spec), spec.gate)
    ids = torch.empty((300, 4), dtype=torch.int32, device="meta")
    x = torch.empty((300, 256), dtype=torch.bfloat16, device="meta")
    for block_scaled in (False, True):
        with recording() as found:
            grouped.run(packed, spec.gate, x, Routing(ids, ids.float()), gpu, block_scaled=block_scaled)
        gemms = [kernel for kernel in found if kernel.short_name in ("gate_up", "down")]
        assert len(gemms) == 2
        promised = block_scaled and not {Feature.MX_MMA, Feature.TCGEN05}.isdisjoint(gpu.family.features)
        assert all((kernel.promise is not None) == promised for kernel in gemms)
        assert all(kernel.constants["MX"] == block_scaled for kernel in gemms)
        assert any(kernel.op == "shared" for kernel in found) == block_scaled


# ---- triton_w4a8 and triton_w8a8 ------------------------------------------------------------------------------------


def spec_of(fmt: str, tokens: int = 512, activations: Activations = Activations.MXFP8) -> MoeSpec:
    return MoeSpec(32, 4, 2880, 2880, fmt, activations, SWIGLU, True, tokens)


BOTH = [(TritonW4A8(), "mxfp4"), (TritonW8A8(), "mxfp8")]


@pytest.mark.parametrize("implementation, fmt", BOTH)
def test_block_scaling_is_claimed_where_the_card_has_it(implementation: BlockScaledMoe, fmt: str) -> None:
    for gpu in KNOWN.values():
        reason = implementation.supports(spec_of(fmt), gpu)
        features = gpu.family.features
        if not features.isdisjoint({Feature.MX_MMA, Feature.TCGEN05}) or (Feature.WGMMA in features and fmt == "mxfp4"):
            assert reason is None
        else:
            assert reason is not None
            assert reason.startswith("needs a block-scaled matrix instruction")
            assert gpu.name in reason


def test_8_bit_activations_on_wgmma_need_a_bounded_gate_and_enough_columns() -> None:
    h200, spec = known("h200"), spec_of("mxfp4")
    for gate in (GELU, SILU):
        reason = TritonW4A8().supports(replace(spec, gate=gate), h200)
        assert reason == f"needs a clamped gate, whose output one scale fits, on wgmma; {gate.kind} is not"
    assert TritonW4A8().supports(replace(spec, intermediate=192), h200) == "needs more than 192 columns on wgmma"
    # The largest that the gate can give is what E4M3 can hold.
    scale = grouped_wgmma.gate_scale(SWIGLU)
    assert scale is not None
    assert scale * SWIGLU.limit * (SWIGLU.limit + 1) <= 448 < 2 * scale * SWIGLU.limit * (SWIGLU.limit + 1)


def test_8_bit_activations_on_wgmma_begin_where_they_pay() -> None:
    units = [TritonW4A8().cost(spec_of("mxfp4", tokens), known("h200")).unit for tokens in (64, 160, 161)]
    assert units == [MatrixUnit.BF16, MatrixUnit.BF16, MatrixUnit.FP8]


@pytest.mark.parametrize("implementation, fmt", BOTH)
def test_other_specs_are_refused_with_the_reason(implementation: BlockScaledMoe, fmt: str) -> None:
    gpu = known("gb10")
    other = "mxfp8" if fmt == "mxfp4" else "mxfp4"
    assert implementation.supports(spec_of(other), gpu) == f"reads {fmt} experts, not {other}"
    bf16 = spec_of(fmt, activations=Activations.BF16)
    assert implementation.supports(bf16, gpu) == "multiplies with mxfp8 activations, not bf16"
    narrow = replace(spec_of(fmt), hidden=2888)
    assert implementation.supports(narrow, gpu) == "needs widths that are multiples of 32, not 2888 and 2880"


def started(implementation: BlockScaledMoe, fmt: str, tokens: int) -> list[Kernel]:
    problem = ExpertsProblem.of(ExpertsInput("few", tokens, hidden=32, intermediate=32), fmt, "cpu")
    spec = replace(spec_of(fmt, tokens), num_experts=problem.packed.num_experts, hidden=32, intermediate=32)
    with recording() as found:
        run_moe(implementation, problem.packed, spec, known("gb10"), problem.x, problem.routing)
    return list(found)


@pytest.mark.parametrize("implementation, fmt", BOTH)
def test_few_tokens_keep_bf16_activations(implementation: BlockScaledMoe, fmt: str) -> None:
    few, more = ({kernel.short_name for kernel in started(implementation, fmt, tokens)} for tokens in (64, 65))
    assert "gate_up_small" in few
    assert "quantise_tokens" not in few
    assert "quantise_tokens" in more
    costs = [implementation.cost(spec_of(fmt, tokens), known("gb10")) for tokens in (1, 512)]
    assert [cost.unit for cost in costs] == [MatrixUnit.BF16, MatrixUnit.FP8]
