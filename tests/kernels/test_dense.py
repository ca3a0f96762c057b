"""Dense layers: reference and dequantized in every weight format, bias and residual, logits, costs, what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from microscale import hardware
from microscale.errors import BadCheckpoint, Unsupported
from microscale.formats import MXFP8, BlockScaled, ChannelScaled, block_format, decode, encode, encode_channels
from microscale.hardware import KNOWN, Feature, Gpu, known
from microscale.kernels import layouts
from microscale.kernels.dense import packed as packing
from microscale.kernels.dense import reference
from microscale.kernels.dense.cost import dense_flops, weight_bytes
from microscale.kernels.dense.dequantized import DequantizedDense
from microscale.kernels.dense.fragments import TritonMxfp4
from microscale.kernels.dense.reference import ReferenceDense, capped, dense, summarise
from microscale.kernels.dense.spec import FORMATS, DenseOp, DenseSpec, DenseWeights
from microscale.kernels.layouts import Packed, RowOrder
from microscale.kernels.op import Activations
from microscale.planning import registry
from microscale_lab.calls import run_dense, run_logits
from support.interpreter import first_and_all, run_cases
from support.shapes import record_dense

TRITON = [
    "triton_bf16", "triton_fp8", "triton_mxfp8", "triton_mxfp4", "triton_nvfp4", "triton_fp8_block",
    "triton_mxfp8_a8", "triton_mxfp4_a8",
]  # fmt: skip
FORMAT = {name: name.removeprefix("triton_").removesuffix("_a8") for name in TRITON}


def make(fmt: str, rows: int, columns: int, bias: bool) -> tuple[DenseWeights, torch.Tensor]:
    """Weights in ``fmt`` and what they mean in float64."""
    generator = torch.Generator().manual_seed(rows)
    plain = torch.randn(rows, columns, generator=generator).bfloat16()
    b = torch.randn(rows, generator=generator).bfloat16() if bias else None
    if fmt == "bf16":
        return DenseWeights(plain, b), plain.double()
    tensor = encode_channels(plain) if fmt == "fp8" else encode(plain, block_format(fmt))
    return DenseWeights(tensor, b), decode(tensor, torch.float64)


def op_of(name: str) -> DenseOp[Any]:
    found = registry.find("dense", name)
    assert isinstance(found, DenseOp)
    return found


@first_and_all
def test_under_the_interpreter(which: str) -> None:
    run_cases("cases_dense.py", which, beside=__file__)


@pytest.mark.parametrize("implementation", [ReferenceDense(), DequantizedDense()], ids=lambda i: i.name)
def test_logits_are_capped(implementation: ReferenceDense | DequantizedDense) -> None:
    """Before the blocks are summed up, which then are those of the capped values."""
    weights, exact = make("bf16", 100, 32, bias=False)
    spec = DenseSpec(100, 32, "bf16", Activations.FLOAT32, False, tokens=2, softcap=5.0)
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(2))
    gpu = hardware.cpu()
    logits = run_logits(implementation, implementation.pack(weights, spec), spec, gpu, x)
    torch.testing.assert_close(logits.values.double(), 5 * torch.tanh(x.double() @ exact.T / 5), rtol=1e-5, atol=1e-5)
    want = summarise(logits.values)
    assert torch.equal(logits.block_max, want.block_max)
    assert torch.equal(logits.block_sum, want.block_sum)
    assert capped(x, None) is x


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(40, 64, 3), (7, 32, 1), (64, 96, 0)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("implementation", [ReferenceDense(), DequantizedDense()], ids=lambda i: i.name)
def test_against_float64(
    fmt: str, rows: int, columns: int, tokens: int, bias: bool, implementation: ReferenceDense | DequantizedDense
) -> None:
    weights, exact = make(fmt, rows, columns, bias)
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(tokens, columns, generator=generator), torch.randn(tokens, rows, generator=generator)
    spec = DenseSpec(rows, columns, weights.format, Activations.FLOAT32, bias, tokens)
    assert spec.weight_format == fmt
    assert implementation.supports(spec, hardware.cpu()) is None
    packed = implementation.pack(weights, spec)
    want = x.double() @ exact.T
    if weights.bias is not None:
        want = want + weights.bias.double()
    torch.testing.assert_close(
        run_dense(implementation, packed, spec, hardware.cpu(), x).double(), want, rtol=1e-5, atol=1e-4
    )
    with_residual = run_dense(implementation, packed, spec, hardware.cpu(), x, residual)
    torch.testing.assert_close(with_residual.double(), want + residual, rtol=1e-5, atol=1e-4)
    logits = run_logits(implementation, packed, spec, hardware.cpu(), x)
    assert logits.values.dtype == torch.float32
    torch.testing.assert_close(logits.values.double(), want, rtol=1e-5, atol=1e-4)


def test_rows_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = make("bf16", 50, 32, bias=True)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    whole = dense(x, weights)
    monkeypatch.setattr(reference, "CHUNK_ROWS", 16)
    torch.testing.assert_close(dense(x, weights), whole, rtol=1e-6, atol=1e-5)


# ---- logits ----------------------------------------------------------------------------------------------------------


def test_blocks_say_what_a_pass_over_all_logits_would() -> None:
    values = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    logits = summarise(values, 64)
    assert logits.block_max.shape == (3, 16)
    best = logits.block_max.argmax(dim=-1, keepdim=True)
    assert torch.equal(logits.block_argmax.gather(1, best).squeeze(1).long(), values.argmax(dim=-1))
    total = (logits.block_max.double().exp() * logits.block_sum).sum(dim=-1).log()
    torch.testing.assert_close(total, values.double().logsumexp(dim=-1))
    # Only blocks whose maximum is among the k largest maxima hold a top-k token.
    k = 5
    blocks = logits.block_max.topk(k).indices
    held = values.topk(k).indices // 64
    assert all(set(row.tolist()) <= set(kept.tolist()) for row, kept in zip(held, blocks, strict=True))


def test_blocks_name_the_lowest_of_equals_and_show_nan() -> None:
    values = torch.tensor([[1.0, 3.0, 3.0, 0.0, -0.0, 0.0, -2.0], [1.0, math.nan, 5.0, 2.0, math.nan, 1.0, 9.0]])
    logits = summarise(values, 3)
    assert logits.block_argmax.tolist() == [[1, 3, 6], [1, 4, 6]]
    assert logits.block_max[0].tolist() == [3.0, 0.0, -2.0]
    assert logits.block_max[1].isnan().tolist() == [True, True, False]
    assert logits.block_sum[1].isnan().tolist() == [True, True, False]
    assert logits.block_sum[0, 2] == 1.0  # the filling of the last block counts for nothing


# ---- packing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4", "nvfp4", "fp8_block"])
def test_fragments_hold_the_weights_bit_for_bit(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, _ = make(fmt, 80, 96, bias=True)
    monkeypatch.setattr(packing, "CHUNK_ROWS", 32)
    packed = packing.pack(weights)
    tensor = weights.weight
    assert isinstance(tensor, BlockScaled | ChannelScaled)
    block = MXFP8 if fmt == "fp8" else block_format(fmt)
    scales = torch.zeros(80 // 16, 2, 8, dtype=torch.int32) if packed.groups is None else packed.groups
    found = layouts.unpack(Packed(packed.weight[None], scales[None], None, block, RowOrder.PLAIN, 96))
    assert torch.equal(found.values[0], tensor.values)
    if isinstance(tensor, ChannelScaled):
        assert packed.groups is None
        assert packed.channels is not None
        assert torch.equal(packed.channels, tensor.scales)
    else:
        assert packed.channels is None
        rounded = 2.0**-8 if fmt == "fp8_block" else 0.0  # scales that are not bf16
        torch.testing.assert_close(found.scales[0], tensor.scales, rtol=rounded, atol=0)
        assert (tensor.row_scales is None) == (found.row_scales is None)
        if tensor.row_scales is not None and found.row_scales is not None:
            assert torch.equal(found.row_scales[0], tensor.row_scales)
    spec = DenseSpec(80, 96, fmt, Activations.BF16, True, 1)
    assert packed.nbytes == op_of(f"triton_{fmt}").packed_bytes(spec)


def test_a_damaged_channel_is_refused() -> None:
    values = torch.zeros(16, 32, dtype=torch.uint8)
    with pytest.raises(BadCheckpoint, match="NaN among its scales"):
        packing.pack(DenseWeights(ChannelScaled(values, torch.full((16,), math.nan))))
    with pytest.raises(BadCheckpoint, match="NaN among its values"):
        packing.pack(DenseWeights(ChannelScaled(values + 0x7F, torch.ones(16))))


def test_layouts_are_shared_where_bytes_are() -> None:
    assert op_of("triton_bf16").layout == op_of("dequantized").layout == "row_major"
    for fmt in ("mxfp8", "mxfp4"):
        assert op_of(f"triton_{fmt}").layout == op_of(f"triton_{fmt}_a8").layout
    assert len({op_of(name).layout for name in TRITON}) == 6


# ---- costs, choices, refusals ----------------------------------------------------------------------------------------


def test_cost_counts_the_formats_own_bytes() -> None:
    sizes = {f: weight_bytes(DenseSpec(201088, 2880, f, Activations.BF16, False, 1)) for f in FORMATS}
    elements = 201088 * 2880
    fp8 = elements + 4 * 201088
    mx = {"mxfp8": 201088 * 90 * 33, "mxfp4": 201088 * 90 * 17, "fp8_block": 201088 * (90 * 34 + 4)}
    assert sizes == {"bf16": elements * 2, "fp8": fp8, **mx, "nvfp4": 201088 * (180 * 9 + 4)}
    assert dense_flops(DenseSpec(8, 4, "bf16", Activations.BF16, False, 3)) == 2 * 3 * 8 * 4


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("name", TRITON)
def test_what_is_started(name: str, gpu: Gpu) -> None:
    """Programmatic launch where the card has it; the instruction for 8-bit activations promised where it has that."""
    implementation, eight = op_of(name), name.endswith("_a8")
    spec = DenseSpec(720, 2880, FORMAT[name], Activations.MXFP8 if eight else Activations.BF16, True, 1)
    block_scaled = gpu.has(Feature.MX_MMA) or gpu.has(Feature.TCGEN05)
    assert (implementation.supports(spec, gpu) is None) == (block_scaled or not eight)
    kernels = record_dense(implementation, spec, gpu, (1, 16, 100, 300))
    assert {kernel.op for kernel in kernels} <= {"dense", "shared"}
    for kernel in kernels:
        assert dict(kernel.options).get("launch_pdl", False) == kernel.constants.get("PDL", False)
        assert kernel.constants.get("PDL", False) <= gpu.has(Feature.PDL)
        if kernel.constants.get("MX") and gpu.has(Feature.MX_MMA):
            assert kernel.promise == r"mma\.sync\S*block_scale"
    assert any(kernel.constants.get("MX") for kernel in kernels) == eight


@pytest.mark.parametrize("name", TRITON)
def test_what_a_kernel_cannot_do_it_says(name: str) -> None:
    implementation = op_of(name)
    fmt = name.removeprefix("triton_").removesuffix("_a8")
    activations = Activations.MXFP8 if name.endswith("_a8") else Activations.BF16
    gpu = known("rtx5090")

    def reason(weight_format: str, activations: Activations, rows: int, columns: int, gpu: Gpu) -> str:
        return implementation.supports(DenseSpec(rows, columns, weight_format, activations, False, 1), gpu) or ""

    assert not reason(fmt, activations, 5120, 2880, gpu)
    assert f"reads {fmt} weights, not int4" in reason("int4", activations, 5120, 2880, gpu)
    assert "activations, not float32" in reason(fmt, Activations.FLOAT32, 5120, 2880, gpu)
    assert "which CPU does not have" in reason(fmt, activations, 5120, 2880, hardware.cpu())
    assert "multiple" in reason(fmt, activations, 5120, 2872, gpu)
    if fmt != "bf16":
        assert "multiples of 16 rows" in reason(fmt, activations, 5121, 2880, gpu)
    if name.endswith("_a8"):
        assert "block-scaled matrix instruction" in reason(fmt, activations, 5120, 2880, known("h200"))


def test_refusals() -> None:
    for implementation in (ReferenceDense(), DequantizedDense()):
        unknown = DenseSpec(8, 32, "int4", Activations.BF16, False, 1)
        assert "int4" in (implementation.supports(unknown, hardware.cpu()) or "")
    with pytest.raises(Unsupported, match="two axes"):
        DenseWeights(torch.zeros(2, 3, 4))
    with pytest.raises(Unsupported, match="not bf16"):
        packing.pack(DenseWeights(torch.zeros(16, 32)))
    weights, _ = make("mxfp4", 16, 32, bias=False)
    spec = DenseSpec(16, 32, "mxfp4", Activations.BF16, False, 1)
    with pytest.raises(Unsupported, match=r"reads rows of bfloat16, not torch\.float32"):
        run_dense(TritonMxfp4(), packing.pack(weights), spec, known("h200"), torch.zeros(1, 32))
