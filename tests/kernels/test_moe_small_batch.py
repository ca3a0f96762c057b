"""The small-batch and ``wgmma`` expert kernels without a GPU.

Gluon does not run in Triton's interpreter. Here its inline assembly is executed word for word on packed weights, the
fragments are put together by the layout's documented map, and the launch rules are held against the cards' limits.
What is plain Triton runs under the interpreter (``cases_moe_small_batch.py``); the kernels themselves run in
``tests/gpu``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from microscale.formats import MXFP4, MXFP8, NVFP4, BlockFormat, BlockScaled, decode, encode
from microscale.hardware import KNOWN, Feature, Gpu, known
from microscale.hardware.tiles.experts import (
    ExpertGemm,
    ExpertShape,
    direct_by_rule,
    direct_down,
    direct_gate_up,
    for_list,
)
from microscale.kernels import fragments_jit
from microscale.kernels.fragments_jit import X_EXPONENT
from microscale.kernels.layouts import MAX_SCALE, Packed, RowOrder, pack
from microscale.kernels.moe import grouped_wgmma, small_batch, wgmma_operands_jit
from microscale.kernels.moe.spec import Activations, Gate, GateKind, MoeSpec
from microscale.kernels.numbers import PEAK_BIAS
from microscale.planning.shards import record_moe
from support.interpreter import first_and_all, run_cases
from support.ptx import execute, halves
from support.tile_choices import unmeasured


def columns_of(words: Tensor, fmt: BlockFormat) -> Tensor:
    """Words → bf16 numbers ``[..., 8 or 4 columns]``, by the kernels' own assembly."""
    if fmt is MXFP4:
        pairs = execute(fragments_jit.MXFP4_TO_BF16, 4, words, words)
    else:
        pairs = execute(fragments_jit.MXFP8_TO_BF16, 2, words, words)
    return torch.stack([number for pair in pairs for number in halves(pair)], dim=-1)


def matrix_of(packed: Packed) -> Tensor:
    """Expert 0 ``[rows, 64 * k_tiles]`` in packed row order, unscaled."""
    numbers = columns_of(packed.words[0].long(), packed.format)
    if packed.format is MXFP4:  # R T (g t) (G h) i → R h g T G t i
        parts = numbers.unflatten(2, (8, 4)).unflatten(4, (2, 2)).permute(0, 5, 2, 1, 4, 3, 6)
    else:  # R T G (g t) (j h) i → R h g T G t j i
        parts = numbers.unflatten(3, (8, 4)).unflatten(5, (2, 2)).permute(0, 6, 3, 1, 2, 4, 5, 7)
    matrix: Tensor = parts.reshape(packed.rows, -1)
    return matrix


def scales_of(packed: Packed) -> Tensor:
    """Bytes ``[rows, 2 * k_tiles]`` of expert 0."""
    v = torch.arange(4)
    parts = (packed.scales[0].long()[..., None] >> 8 * v & 0xFF).unflatten(-1, (2, 2))  # R T g G h
    scales: Tensor = parts.permute(0, 4, 2, 1, 3).reshape(packed.rows, -1)
    return scales


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda fmt: fmt.name)
def test_every_code_becomes_its_number(fmt: BlockFormat) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(64)
    if fmt is MXFP8:
        codes[(codes & 0x7F) == 0x7F] = 0
    values = codes[torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))].view(1, 16, -1)
    k = values.shape[-1] * 8 // fmt.bits
    tensor = BlockScaled(values, torch.full((1, 16, k // 32), 127, dtype=torch.uint8), fmt)
    constant = 2.0**126 if fmt is MXFP4 else 2.0**120
    assert torch.equal(matrix_of(pack(tensor, RowOrder.PLAIN)).double() * constant, decode(tensor, torch.float64)[0])


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("k", [64, 96, 704])
def test_a_product_from_packed_words_is_the_reference(fmt: BlockFormat, k: int) -> None:
    """The walk of the small-batch kernel: groups of 32 in bf16 times bf16, scales and sums in float32."""
    generator = torch.Generator().manual_seed(k)
    tensor = encode(torch.randn(1, 64, k, generator=generator), fmt)
    x = torch.randn(k, 3, generator=generator).bfloat16()
    packed = pack(tensor, RowOrder.PLAIN)
    groups = matrix_of(packed).unflatten(1, (-1, 32))[:, : k // 32]  # the filling meets tokens that are masked to zero
    scaled = halves(execute(fragments_jit.SCALE_BF16, 1, x.view(torch.int16).long() & 0xFFFF)[0])[0]
    assert torch.equal(scaled, x.float() * 2.0**X_EXPONENT)
    partial = torch.einsum("rgk,gkn->rgn", groups, scaled.unflatten(0, (-1, 32)))
    scales = (scales_of(packed)[:, : k // 32] << 23).int().view(torch.float32)
    unscale = fragments_jit.MXFP4_UNSCALE if fmt is MXFP4 else fragments_jit.MXFP8_UNSCALE
    y = (partial * scales[..., None]).sum(1) * unscale.value
    torch.testing.assert_close(y, decode(tensor)[0] @ x.float(), rtol=1e-5, atol=1e-5)


def test_nvfp4_weights_are_exact_with_their_scale() -> None:
    """The fold of the small-batch kernels: code times scale times 2**-64 in bf16, for every code under every positive
    scale of E4M3 and 0."""
    scales = torch.arange(128, dtype=torch.uint8).clamp(max=0x7E).view(1, 16, 8)
    for shift in range(16):
        codes = ((torch.arange(16) + shift) % 16).to(torch.uint8).repeat(1, 16, 8)
        tensor = BlockScaled(codes[..., 0::2] | codes[..., 1::2] << 4, scales, NVFP4, torch.ones(1, 16))
        packed = pack(tensor, RowOrder.PLAIN)
        factors = torch.stack(execute(fragments_jit.NVFP4_FACTORS, 4, packed.scales[0, :, :-1].long()), dim=-1)
        factors = factors.view(1, 2, 8, 2, 1, 4).expand(-1, -1, -1, -1, 2, -1).reshape(1, 2, 32, 4)  # R T (g t) v
        words = packed.words[0].long()
        pairs = execute(fragments_jit.NVFP4_TO_BF16, 4, words, words, factors, factors)
        numbers = torch.stack([number for pair in pairs for number in halves(pair)], dim=-1)
        parts = numbers.unflatten(2, (8, 4)).unflatten(4, (2, 2)).permute(0, 5, 2, 1, 4, 3, 6)
        assert torch.equal(parts.reshape(16, 128).double() * 2.0**64, decode(tensor, torch.float64)[0])


@pytest.mark.parametrize(
    "fmt, text",
    [(MXFP4, wgmma_operands_jit.SCALE_WORDS), (MXFP8, wgmma_operands_jit.MXFP8_SCALE_WORDS)],
    ids=["mxfp4", "mxfp8"],
)
def test_grouped_weights_are_exact_with_their_scale(fmt: BlockFormat, text: str) -> None:
    """The fold of the ``wgmma`` kernel: code times scale times 2**-64 in bf16, for every scale down to 2**-61 (MXFP8:
    2**-53, since its smallest code is 2**-9)."""
    for low in range(66 if fmt is MXFP4 else 74, MAX_SCALE + 1, 16):
        generator = torch.Generator().manual_seed(low)
        high = min(low + 16, MAX_SCALE + 1)
        values = torch.randint(0, 256, (1, 32, 16 * fmt.bits), dtype=torch.uint8, generator=generator)
        if fmt is MXFP8:
            values = torch.where(values % 128 == 127, 0, values)  # E4M3's NaN
        scales = torch.randint(low, high, (1, 32, 4), dtype=torch.uint8, generator=generator)
        packed = pack(BlockScaled(values, scales, fmt), RowOrder.PLAIN)
        words = execute(text, 4, packed.scales[0].long())
        factor = torch.stack([halves(word)[0] for word in words], dim=-1)  # R T g v
        assert torch.equal(factor, torch.stack([halves(word)[1] for word in words], dim=-1))
        rows = factor.unflatten(-1, (2, 2)).permute(0, 4, 2, 1, 3).reshape(32, 4)
        product = matrix_of(packed).double() * rows.double().repeat_interleave(32, dim=1)
        assert torch.equal(product.bfloat16().double(), product)
        assert torch.equal(product * 2.0**64, decode(BlockScaled(values, scales, fmt), torch.float64)[0])


def e4m3_of(packed: Packed) -> tuple[Tensor, Tensor]:
    """Expert 0 by the kernels' own assembly: E4M3 ``[rows, 64 * k_tiles]`` and each row's factor."""
    assert packed.peaks is not None
    peaks = packed.peaks[0].long() & 0xFFFFFFFF  # [R, 8 = g]
    twice = [(peaks >> 16 * h & 0xFFFF) * 0x10001 for h in range(2)]
    tables = execute(wgmma_operands_jit.TABLES, 8, packed.scales[0].long(), *(t[:, None] for t in twice))
    low = torch.stack(tables[0::2], -1)[:, :, :, None]  # [R, T, g, 1, v]
    high = torch.stack(tables[1::2], -1)[:, :, :, None]
    words = packed.words[0].long().unflatten(2, (8, 4))  # [R, T, g, t, v]
    magnitude0, magnitude1, sign0, sign1 = execute(wgmma_operands_jit.MXFP4_TO_E4M3, 4, words, low, high)
    registers = []
    for magnitude, sign in ((magnitude0, sign0), (magnitude1, sign1)):
        four = [word for word in (magnitude, sign) for _ in range(4)]
        registers.append(execute(wgmma_operands_jit.SIGNED, 1, *four)[0])
    codes = torch.stack([registers[p] >> 8 * e & 0xFF for e in range(4) for p in range(2)], -1)  # R T g t v (e p)
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).float().unflatten(-1, (2, 2, 2)).unflatten(4, (2, 2))
    # R T g t G h a b' p, column 8 t + 4 a + 2 (1 - b') + p
    parts = numbers.flip(7).permute(0, 5, 2, 1, 4, 3, 6, 7, 8)
    peak = PEAK_BIAS - torch.stack([t & 0xFFFF for t in twice], 1)  # [R, h, g]
    matrix: Tensor = parts.reshape(packed.rows, -1)
    return matrix, torch.exp2(peak.flatten().double() - 133)


def test_e4m3_weights_are_exact_over_12_octaves() -> None:
    for top in (12, 127, MAX_SCALE):
        generator = torch.Generator().manual_seed(top)
        values = torch.randint(0, 256, (1, 64, 96), dtype=torch.uint8, generator=generator)
        scales = torch.randint(top - 11, top + 1, (1, 64, 6), dtype=torch.uint8, generator=generator)
        scales[:, :, 3] = top
        tensor = BlockScaled(values, scales, MXFP4)
        numbers, factor = e4m3_of(pack(tensor, RowOrder.INTERLEAVED))
        expected = decode(tensor, torch.float64)[0].unflatten(0, (4, 8, 2)).transpose(1, 2).reshape(64, -1)
        assert torch.equal(numbers.double() * factor[:, None], expected)


def test_a_group_far_below_its_rows_peak_is_off_by_less_than_the_bound() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (1, 32, 64), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, 121, (1, 32, 4), dtype=torch.uint8, generator=generator)
    scales[:, :, 1] = 120
    tensor = BlockScaled(values, scales, MXFP4)
    numbers, factor = e4m3_of(pack(tensor, RowOrder.PLAIN))
    expected = decode(tensor, torch.float64)[0]
    error = (numbers.double() * factor[:, None] - expected).abs().amax()
    assert 0 < error < 2.0**-10 * 6 * 2.0 ** (120 - 127)


@first_and_all
def test_plain_triton_parts_under_the_interpreter(which: str) -> None:
    run_cases("cases_moe_small_batch.py", which, beside=__file__)


# ---- launch rules ----------------------------------------------------------------------------------------------------


GPT_OSS = ExpertShape(5760 // 16, 2880 // 64, 4, 128)


def test_few_warps_on_a_large_card_share_k() -> None:
    """By the rule. 30 warps on each of GB10's 48 SMs need no help."""
    assert direct_by_rule(GPT_OSS, 1, 4, known("a100")).slices > direct_by_rule(GPT_OSS, 1, 4, known("gb10")).slices


@pytest.mark.parametrize("tokens", [1, 2])
def test_gate_and_up_of_few_tokens_run_in_one_wave(tokens: int) -> None:
    h200 = known("h200")
    tiles = direct_gate_up(GPT_OSS, tokens, 4, h200)
    assert tiles.registers is not None, "one wave is known only where it was measured"
    room = h200.num_sms * (h200.registers_per_sm // (32 * tiles.registers * tiles.warps))
    assert tokens * 4 * GPT_OSS.row_tiles / tiles.row_tiles < room


def test_a_card_with_slow_memory_keeps_less_in_flight() -> None:
    cards = (unmeasured(known(name)) for name in ("h200", "rtx5090"))
    fast, slow = (for_list(ExpertGemm.GATE_UP_LIST, GPT_OSS, 8, 4, card).ahead for card in cards)
    assert slow < fast


def test_half_a_tile_at_the_end_of_k_takes_a_tile_of_a_batch() -> None:
    """Of one rank of two of gpt-oss: with 5 ahead its ``down`` would spill."""
    h200, whole = known("h200"), ExpertShape(2880 // 16, 23, 4, 128)
    for tokens, ahead in ((3, 2), (4, 5), (8, 5), (16, 4)):
        assert for_list(ExpertGemm.DOWN_LIST, whole, tokens, 4, h200).ahead == ahead
        half = for_list(ExpertGemm.DOWN_LIST, replace(whole, half_tile=True), tokens, 4, h200)
        assert half.ahead == min(ahead, 4)
    for k, half_tile in ((96, True), (128, False)):
        packed = pack(encode(torch.ones(1, 16, k), MXFP4), RowOrder.PLAIN)
        assert small_batch.shape_of(packed).half_tile is half_tile


@pytest.mark.parametrize("k", [32, 64, 96, 160, 704, 2112, 2816, 2880])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_batch_is_never_longer_than_the_walk(k: int, bits: int) -> None:
    shape = ExpertShape(4, -(-k // 64), bits, 32)
    for tiles in (direct_down(shape, 1, 2, known("h200")), for_list(ExpertGemm.DOWN_LIST, shape, 8, 4, known("h200"))):
        steps = -(-shape.k_tiles // tiles.slices)
        assert 1 <= tiles.ahead <= steps
        # Every slice but the last is whole: an empty one would read another expert's rows.
        assert (tiles.slices - 1) * steps < shape.k_tiles


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "nvfp4", "fp8_block"])
def test_what_is_started(fmt: str, gpu: Gpu) -> None:
    """Programmatic launch where the card has it, matrix instructions promised, wgmma where the card has
    it: for MXFP8 in resident programs alone, for FP8 blocks never."""
    gate = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
    spec = MoeSpec(8, 4, 2880, 2880, fmt, Activations.BF16, gate, True, 1)
    kernels = record_moe(spec, gpu, (1, 2, 8, 300))
    for kernel in kernels:
        assert dict(kernel.options).get("launch_pdl", False) == kernel.constants.get("PDL", False)
        assert kernel.constants.get("PDL", False) <= gpu.has(Feature.PDL)
    small = [kernel for kernel in kernels if kernel.short_name in ("gate_up_small", "down_small", "down_direct")]
    assert {kernel.short_name for kernel in small} == {"gate_up_small", "down_small", "down_direct"}
    assert all(kernel.promise == small_batch.MMA for kernel in small)
    on_wgmma = [kernel for kernel in kernels if kernel.promise == grouped_wgmma.MMA]
    assert bool(on_wgmma) == (gpu.has(Feature.WGMMA) and fmt != "fp8_block")
    if fmt == "mxfp8":
        assert {kernel.short_name for kernel in on_wgmma} <= {"grouped_gemm_resident"}
