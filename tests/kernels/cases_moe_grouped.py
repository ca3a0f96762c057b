"""The grouped expert kernels against the reference, and their bit arithmetic exhaustively. Runs in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from microscale.errors import Unsupported
from microscale.formats import MXFP4, MXFP8, NVFP4, BlockFormat, BlockScaled, decode, encode
from microscale.formats.mxfp4 import unpack_nibbles
from microscale.formats.nvfp4 import encode_rows
from microscale.hardware import Feature, Gpu, known
from microscale.hardware.cards import SM90
from microscale.hardware.tiles.gemm import GemmPath, GemmTile
from microscale.kernels import layouts, mxfp8_jit
from microscale.kernels import operands_jit as jit
from microscale.kernels.layouts import RowOrder
from microscale.kernels.moe import grouped
from microscale.kernels.narrow import nvfp4
from microscale_lab.cases.errors import assert_close, check_rounded
from microscale_lab.cases.experts import LAYERS as CASES
from microscale_lab.cases.experts import SWIGLU, ExpertsInput, ExpertsProblem
from microscale_lab.cases.moe import SAME_NVFP4

AMPERE = known("a100")
# The interpreter truncates where `combine` rounds to bf16: twice the error of one rounding.
COMBINE = 2
# MXFP8 cases that differ from MXFP4 ones: several tiles, unused experts, half tiles at both ends.
SOME = [case for case in CASES if case.tokens == 37 or case.hidden in (160, 352)]


def run(
    problem: ExpertsProblem, block_scaled: bool, block_m: int = 16, block_n: int = 128, gpu: Gpu = AMPERE
) -> torch.Tensor:
    tile = GemmTile(block_m, block_n, 128 if block_scaled else 64, 4, 2)
    return grouped.run(
        problem.packed, problem.layer.gate, problem.x, problem.routing, gpu, block_scaled=block_scaled, tile=tile
    )


FORMATS = [(case, "mxfp4") for case in CASES] + [(case, "mxfp8") for case in SOME]
IDS = [f"{fmt}, {case.name}" for case, fmt in FORMATS]
ROW_SCALED = [(case, fmt) for fmt in ("nvfp4", "fp8_block") for case in SOME]


@pytest.mark.parametrize("case, fmt", [*FORMATS, *ROW_SCALED], ids=[*IDS, *(f"{f}, {c.name}" for c, f in ROW_SCALED)])
def test_bf16_activations(case: ExpertsInput, fmt: str) -> None:
    problem = ExpertsProblem.of(case, fmt, "cpu")
    # Roundings to bf16: h, the parts of each expert, and the result; of FP8 blocks both matrices' weights.
    weights = 2 if fmt == "fp8_block" else 0
    check_rounded(run(problem, block_scaled=False), problem.expected(), "bf16", 2 + COMBINE + weights)


@pytest.mark.parametrize("case, fmt", FORMATS, ids=IDS)
def test_mxfp8_activations(case: ExpertsInput, fmt: str) -> None:
    problem = ExpertsProblem.of(case, fmt, "cpu")
    actual = run(problem, block_scaled=True)
    # Against a reference that quantises alike nothing is left but the roundings of the parts and the result.
    check_rounded(actual, problem.expected_quantised(), "bf16", 1 + COMBINE)
    # Against float32: two roundings to E4M3, and a group's largest element may saturate by 2**-3, twice a rounding.
    check_rounded(actual, problem.expected(), "e4m3", 3)


@pytest.mark.parametrize("case", SOME, ids=[case.name for case in SOME])
def test_nvfp4_activations(case: ExpertsInput) -> None:
    problem = ExpertsProblem.of(case, "nvfp4", "cpu")
    actual = run(problem, block_scaled=True)
    assert_close(actual, problem.expected_quantised(nvfp4, nvfp4), worst=SAME_NVFP4.worst, rms=SAME_NVFP4.rms)
    check_rounded(actual, problem.expected(), "e2m1", 3)


@pytest.mark.parametrize("block_m, block_n", [(32, 64), (64, 128)])
@pytest.mark.parametrize("fmt, block_scaled", [("mxfp4", False), ("mxfp4", True), ("nvfp4", True)])
def test_other_tiles_give_the_same(block_m: int, block_n: int, fmt: str, block_scaled: bool) -> None:
    problem = ExpertsProblem.of(
        ExpertsInput("tiles", 36, num_experts=2, top_k=1, hidden=96, intermediate=96), fmt, "cpu"
    )
    first, second = run(problem, block_scaled), run(problem, block_scaled, block_m, block_n)
    # Each sum over K runs in the same order whatever the tile, but numpy's matrix product does not promise one.
    check_rounded(second, first.float(), "bf16", 1)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "nvfp4"])
def test_order_of_columns_for_whole_tiles(fmt: str) -> None:
    """On wgmma and tcgen05 the tokens are permuted in registers. The interpreter has no programmatic launches."""
    problem = ExpertsProblem.of(ExpertsInput("whole", 5, num_experts=2, hidden=96, intermediate=160), fmt, "cpu")
    hopper = replace(known("h200"), family=replace(SM90, features=SM90.features - {Feature.PDL}))
    check_rounded(run(problem, False, gpu=hopper), problem.expected(), "bf16", 2 + COMBINE)


def test_no_tokens() -> None:
    problem = ExpertsProblem.of(ExpertsInput("empty", 0), "mxfp4", "cpu")
    assert run(problem, block_scaled=False).shape == (0, 128)


def test_float32_rows_are_refused() -> None:
    problem = ExpertsProblem.of(ExpertsInput("one token", 1), "mxfp4", "cpu")
    with pytest.raises(Unsupported, match="bfloat16"):
        grouped.run(problem.packed, SWIGLU, problem.x.float(), problem.routing, AMPERE)


def test_a_broken_token_shows_and_stays_alone() -> None:
    for fmt, block_scaled in (("mxfp4", False), ("mxfp4", True), ("nvfp4", True)):
        problem = ExpertsProblem.of(ExpertsInput("broken", 3, hidden=96, intermediate=96), fmt, "cpu")
        problem.x[1, 50] = float("nan")
        y = run(problem, block_scaled)
        assert y[1].isnan().all()
        assert not y[0].isnan().any()
        assert not y[2].isnan().any()


# ---- bit arithmetic, exhaustively -----------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def unpack_kernel(  # type: ignore[no-untyped-def]
    words_ptr, scales_ptr, out_ptr, out_scale_ptr, BITS: tl.constexpr, NVFP4: tl.constexpr, MX: tl.constexpr,
    QUADS: tl.constexpr,
):  # fmt: skip
    q = tl.load(words_ptr + tl.arange(0, 32 * BITS)).reshape(1, 32 * BITS).to(tl.uint32, bitcast=True)
    if BITS == 8 and not MX:  # the bf16 path loads the groups apart and joins them
        q = q.reshape(1, 2, 128).permute(0, 2, 1)
    if NVFP4:
        pairs = scales_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        s = tl.load(pairs + tl.arange(0, 8)).reshape(1, 8).to(tl.uint64, bitcast=True)
    else:
        s = tl.load(scales_ptr + tl.arange(0, 8)).reshape(1, 8).to(tl.uint32, bitcast=True)
    at = tl.arange(0, 16)[:, None] * 64 + tl.arange(0, 64)[None, :]
    if MX:
        codes, scales = jit.e4m3_weights(q, s, BITS, 1, 1, True)
        tl.store(out_ptr + at, codes)
        tl.store(out_scale_ptr + tl.arange(0, 16)[:, None] * 2 + tl.arange(0, 2)[None, :], scales)
    else:
        tl.store(out_ptr + at, jit.bf16_weights(q, s, BITS, NVFP4, 1, QUADS, True).to(tl.float32))


def fragment_order(x: torch.Tensor, mx: bool, quads: bool = False) -> torch.Tensor:
    """Columns as the matrix unit meets them, from the text of operands_jit."""
    column = torch.arange(x.shape[-1])
    group, t, i = column // 32 * 32, column % 32 // 8, column % 8
    if mx:
        place = group + 16 * (i // 4) + 4 * t + 2 * (i % 2) + (1 - i // 2 % 2)
    elif quads:
        place = group + 16 * (i // 4) + 4 * t + i % 4
    else:
        place = group + 16 * (i // 4) + 8 * (i // 2 % 2) + 2 * t + i % 2
    out = torch.empty_like(x)
    out[..., place] = x
    return out


def all_codes(bits: int, shift: int) -> torch.Tensor:
    """One tile 16 x 64 whose values run through all codes; over all shifts each place meets each code."""
    if bits == 4:
        codes = (torch.arange(1024).view(16, 64) + shift) % 16
        return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)[None]
    codes = (torch.arange(1024).view(16, 64) + shift) % 256
    return torch.where(codes % 128 == 127, 0, codes).to(torch.uint8)[None]  # E4M3's two NaN codes are no weights


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=["mxfp4", "mxfp8"])
@pytest.mark.parametrize("mx, quads", [(False, False), (False, True), (True, False)], ids=["bf16", "quads", "e4m3"])
def test_every_code_at_every_place(fmt: BlockFormat, mx: bool, quads: bool) -> None:
    bits = fmt.bits
    generator = torch.Generator().manual_seed(0)
    for shift in range(16 if bits == 4 else 4):
        scales = torch.randint(80, 193, (1, 16, 2), generator=generator, dtype=torch.uint8)
        tensor = BlockScaled(all_codes(bits, shift), scales, fmt)
        packed = layouts.pack(tensor, RowOrder.PLAIN)
        out = torch.empty(16, 64, dtype=torch.uint8 if mx else torch.float32)
        found = torch.empty(16, 2, dtype=torch.uint8)
        unpack_kernel[(1,)](packed.words, packed.scales, out, found, BITS=bits, NVFP4=False, MX=mx, QUADS=quads)
        want = fragment_order(decode(tensor)[0], mx, quads)
        if mx:
            assert torch.equal(found, scales[0])
            values = decode(BlockScaled(out, found, MXFP8)) * (64 if bits == 4 else 1)
            assert torch.equal(values, want)
        else:
            assert torch.equal(out * 2.0**64, want)


@pytest.mark.parametrize("quads", [False, True], ids=["bf16", "quads"])
def test_every_nvfp4_code_under_every_scale(quads: bool) -> None:
    """64 blocks a tile: every positive scale of E4M3, subnormal ones and 448 too, zero and a negative one."""
    for first, shift in ((0, 0), (63, 5), (127, 11)):
        scales = (torch.arange(64, dtype=torch.uint8) + first).clamp(max=0x81).view(1, 16, 4)
        scales = torch.where(scales == 0x7F, 0x7E, scales)
        tensor = BlockScaled(all_codes(4, shift), scales, NVFP4, torch.ones(1, 16))
        packed = layouts.pack(tensor, RowOrder.PLAIN)
        out = torch.empty(16, 64)
        unpack_kernel[(1,)](packed.words, packed.scales, out, out, BITS=4, NVFP4=True, MX=False, QUADS=quads)
        assert torch.equal(out * 2.0**64, fragment_order(decode(tensor)[0], False, quads))


@triton.jit  # type: ignore[untyped-decorator]
def round_kernel(x_ptr, codes_ptr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes_ptr + at, mxfp8_jit.round_e4m3(tl.load(x_ptr + at), True))


def test_round_e4m3_for_every_bf16_and_every_midpoint() -> None:
    numbers = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    exact = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (exact[1:] + exact[:-1]) / 2
    near = torch.cat((middle, middle.nextafter(torch.tensor(0.0)), middle.nextafter(torch.tensor(1e9)), -middle))
    x = torch.cat((numbers[numbers.isfinite()], near))
    x = torch.cat((x, x.new_zeros(-x.numel() % 4096)))
    codes = torch.empty(x.numel(), dtype=torch.uint8)
    round_kernel[(x.numel() // 4096,)](x, codes, BLOCK=4096)
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes, want)


def test_quantised_tokens_are_the_format() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 224, generator=generator) * torch.exp2(torch.randint(-30, 30, (5, 224), generator=generator))
    x = x.bfloat16()
    x[0, :32] = 0.0
    x[1, 3] = float("nan")
    x[1, 40] = float("-inf")
    x[2, :32] = torch.arange(1, 33, dtype=torch.int16).view(torch.bfloat16)  # subnormal bf16
    x[3, 64:96] = torch.tensor([3.3895e38, *([-1.0] * 31)])
    found, want = grouped.quantise(x, GemmPath.W8A8), encode(x, MXFP8)
    assert found.scales is not None
    assert torch.equal(found.scales[:, :7], want.scales)
    assert torch.equal(found.values[:, :224], fragment_order(want.values, mx=True))
    assert not found.scales[:, 7:].any()
    assert not found.values[:, 224:].any()


def test_rows_in_nvfp4_are_the_format() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 224, generator=generator) * torch.exp2(torch.randint(-30, 30, (6, 1), generator=generator))
    x = x.bfloat16()
    x[0, 3] = float("nan")
    x[0, 40] = float("-inf")
    x[1] = 0.0
    x[2, :16] = 0.0
    x[3, :32] *= 1e-4  # scales of blocks that are subnormal
    x[4, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -2.5, -3.5, -5.0, 0, 1, 2])
    found, want = grouped.quantise(x, GemmPath.W4A4), encode_rows(x)
    assert found.scales is not None
    assert want.row_scales is not None
    assert torch.equal(found.scales[:, -1].int().view(torch.float32), want.row_scales)
    scales = found.scales[:, :-1].contiguous().view(torch.uint8)
    assert torch.equal(scales[:, :14], want.scales)
    order = [2, 0, 6, 4, 3, 1, 7, 5]
    nibbles = unpack_nibbles(found.values)
    assert torch.equal(nibbles[:, :224], unpack_nibbles(want.values).reshape(6, -1, 8)[:, :, order].flatten(1))
    assert not nibbles[:, 224:].any()
