"""MXFP4 and MXFP8: exact decoding of everything, encoding by the OCP rules, checked against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from microscale.errors import Unsupported
from microscale.formats import (
    BLOCK,
    MXFP4,
    MXFP8,
    BlockFormat,
    BlockScaled,
    block_format,
    decode,
    decode_scales,
    encode,
)
from microscale.formats.mxfp4 import VALUES, pack_nibbles, round_e2m1, unpack_nibbles
from microscale.formats.mxfp8 import round_e4m3

FORMATS = [MXFP4, MXFP8]


def e4m3_value(code: int) -> float:
    """From the definition: sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 0xF and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa, -9)
    return sign * math.ldexp(8 + mantissa, exponent - 10)


ELEMENTS: dict[BlockFormat, list[float]] = {MXFP4: list(VALUES), MXFP8: [e4m3_value(code) for code in range(256)]}


def every_code_and_scale(fmt: BlockFormat) -> tuple[BlockScaled, torch.Tensor]:
    """Every element code under every scale byte, and the exact values in float64: ``[256, codes]``."""
    codes = torch.arange(len(ELEMENTS[fmt]), dtype=torch.uint8).repeat(2)[: max(BLOCK, len(ELEMENTS[fmt]))]
    exact = torch.tensor([ELEMENTS[fmt][c] for c in codes.tolist()], dtype=torch.float64)
    scale = torch.tensor([math.nan if b == 255 else 2.0 ** (b - 127) for b in range(256)], dtype=torch.float64)
    values = (pack_nibbles(codes) if fmt is MXFP4 else codes).expand(256, -1).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, len(codes) // BLOCK).contiguous()
    return BlockScaled(values, scales, fmt), exact * scale[:, None]


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_decode_is_exact_for_every_code_and_scale(fmt: BlockFormat) -> None:
    tensor, exact = every_code_and_scale(fmt)
    torch.testing.assert_close(decode(tensor, torch.float64), exact, rtol=0, atol=0, equal_nan=True)
    # float32 rounds only what it cannot hold: beyond its largest value, to infinity. Signs of zeros survive.
    wide = decode(tensor, torch.float32)
    torch.testing.assert_close(wide, exact.float(), rtol=0, atol=0, equal_nan=True)
    finite = exact.abs() <= torch.finfo(torch.float32).max
    assert torch.equal(wide[finite].double(), exact[finite])
    number = ~exact.isnan()
    assert torch.equal(torch.signbit(wide[number]), torch.signbit(exact[number]))


def test_bfloat16_holds_mxfp4_exactly() -> None:
    tensor, exact = every_code_and_scale(MXFP4)
    narrow = decode(tensor, torch.bfloat16)
    finite = exact.abs() <= torch.finfo(torch.bfloat16).max
    assert torch.equal(narrow[finite].double(), exact[finite])


def test_scale_byte_0_is_not_zero_and_255_is_nan() -> None:
    scales = decode_scales(torch.tensor([0, 127, 254, 255], dtype=torch.uint8), torch.float64)
    assert scales[:3].tolist() == [2.0**-127, 1.0, 2.0**127]
    assert math.isnan(scales[3])


def test_decode_equals_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 8, 5, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(1, 250, (3, 8, 5), dtype=torch.uint8, generator=generator)
    # transformers gives [experts, columns, rows].
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(decode(BlockScaled(blocks.flatten(-2), scales, MXFP4)), theirs)


def nearest(value: Fraction, fmt: BlockFormat) -> int:
    """The code nearest to a scaled value by exact arithmetic: ties to even, saturating. Slow and obvious."""
    codes = [c for c, v in enumerate(ELEMENTS[fmt]) if not math.isnan(v) and math.copysign(1, v) > 0]
    magnitude = min(abs(value), Fraction(fmt.max_value))
    distances = {code: abs(Fraction(ELEMENTS[fmt][code]) - magnitude) for code in codes}
    least = min(distances.values())
    best = [code for code in codes if distances[code] == least]
    return next((c for c in best if c % 2 == 0), best[0]) if len(best) > 1 else best[0]


def expected_block(block: list[float], fmt: BlockFormat) -> tuple[int, list[int]]:
    """Scale byte and codes of one finite block, from the text of the specification."""
    largest = max(Fraction(abs(x)) for x in block)
    if largest == 0:
        exponent = -127
    else:
        _, e = math.frexp(float(largest))
        exponent = max(-127, min(127, e - 1 - fmt.max_exponent))
    scale = Fraction(2) ** exponent
    sign_bit = 1 << (fmt.bits - 1)
    codes = [nearest(Fraction(x) / scale, fmt) | (sign_bit if math.copysign(1, x) < 0 else 0) for x in block]
    return exponent + 127, codes


def encoded_codes(tensor: BlockScaled) -> list[int]:
    return (unpack_nibbles(tensor.values) if tensor.format is MXFP4 else tensor.values).flatten().tolist()


float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
near_one = st.floats(min_value=-8, max_value=8, width=32)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_encode_follows_the_specification(fmt: BlockFormat, data: st.DataObject) -> None:
    source = data.draw(st.sampled_from([float32s, near_one, st.sampled_from([0.0, -0.0, 2.0**-149, -(2.0**-126)])]))
    block = data.draw(st.lists(source, min_size=BLOCK, max_size=BLOCK))
    tensor = encode(torch.tensor(block, dtype=torch.float32), fmt)
    scale, codes = expected_block(block, fmt)
    assert tensor.scales.item() == scale
    assert encoded_codes(tensor) == codes


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_rounding_at_every_midpoint(fmt: BlockFormat) -> None:
    """Each midpoint between neighbours, and the float32 just below and above it."""
    grid = sorted(v for v in ELEMENTS[fmt] if not math.isnan(v) and math.copysign(1, v) > 0)
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(grid)])
    points = torch.cat(
        [middles, torch.nextafter(middles, torch.tensor(0.0)), torch.nextafter(middles, torch.tensor(1e9))]
    )
    points = torch.cat([points, -points])
    rounded = round_e2m1(points) if fmt is MXFP4 else round_e4m3(points)
    sign_bit = 1 << (fmt.bits - 1)
    want = [nearest(Fraction(p), fmt) | (sign_bit if p < 0 else 0) for p in points.tolist()]
    assert rounded.tolist() == want


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_what_was_decoded_encodes_to_itself(fmt: BlockFormat) -> None:
    """Values that the format holds survive; only the choice of scale may differ."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 4 * BLOCK, generator=generator) * torch.exp2(
        torch.randint(-90, 90, (64, 1), generator=generator)
    )
    once = decode(encode(x, fmt))
    assert torch.equal(decode(encode(once, fmt)), once)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_error_is_within_what_saturation_cuts(fmt: BlockFormat) -> None:
    """Relative to the block's largest: at most what saturation cuts (448 of 512, 6 of 8), more than half a step."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(256, BLOCK, generator=generator)
    error = (decode(encode(x, fmt)) - x).abs().amax(-1) / x.abs().amax(-1)
    top = {MXFP4: 2 / 8, MXFP8: 64 / 512}[fmt]
    assert error.max() <= top


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_bad_number_becomes_nan_and_no_other(fmt: BlockFormat, bad: float) -> None:
    x = torch.ones(3, 2 * BLOCK)
    x[1, BLOCK + 5] = bad
    tensor = encode(x, fmt)
    assert tensor.scales[1, 1] == 255
    decoded = decode(tensor)
    assert decoded[1, BLOCK:].isnan().all()
    decoded[1, BLOCK:] = 1.0
    assert torch.equal(decoded, torch.ones(3, 2 * BLOCK))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_zero_blocks_and_their_signs(fmt: BlockFormat) -> None:
    x = torch.zeros(BLOCK)
    x[3] = -0.0
    tensor = encode(x, fmt)
    assert tensor.scales.item() == 0
    assert torch.equal(torch.signbit(decode(tensor)), torch.signbit(x))
    assert torch.equal(decode(tensor), x)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_extremes(fmt: BlockFormat) -> None:
    largest = torch.full((BLOCK,), torch.finfo(torch.float32).max)
    assert decode(encode(largest, fmt), torch.float64).max() == 2.0 ** (127 - fmt.max_exponent) * fmt.max_value
    smallest = torch.full((BLOCK,), 2.0**-149)
    tensor = encode(smallest, fmt)
    assert tensor.scales.item() == 0
    assert torch.equal(decode(tensor), torch.zeros(BLOCK))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_input_types_encode_like_float32(dtype: torch.dtype) -> None:
    x = torch.randn(8, BLOCK, generator=torch.Generator().manual_seed(3)).to(dtype)
    for fmt in FORMATS:
        ours, theirs = encode(x, fmt), encode(x.float(), fmt)
        assert torch.equal(ours.values, theirs.values)
        assert torch.equal(ours.scales, theirs.scales)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_float64_rounds_once(fmt: BlockFormat, data: st.DataObject) -> None:
    """Not by way of float32: just beside a midpoint, two roundings would go the wrong way."""
    middles = [0.25, 0.75, 2.5, 5.0, 1 + 2**-4, 2**-10, 300 * 2**-9]
    near = st.builds(
        lambda m, s, e: m * (1 + s * 2.0**-e), st.sampled_from(middles), st.integers(-1, 1), st.integers(20, 50)
    )
    source = st.one_of(near, st.floats(allow_nan=False, allow_infinity=False))
    block = data.draw(st.lists(source, min_size=BLOCK, max_size=BLOCK))
    tensor = encode(torch.tensor(block, dtype=torch.float64), fmt)
    scale, codes = expected_block(block, fmt)
    assert tensor.scales.item() == scale
    assert encoded_codes(tensor) == codes


def test_nibbles_round_trip() -> None:
    pairs = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(pairs)), pairs)
    assert unpack_nibbles(torch.tensor([0x21], dtype=torch.uint8)).tolist() == [1, 2]


def test_indexing_and_size() -> None:
    tensor = encode(torch.randn(4, 6, 2 * BLOCK), MXFP4)
    assert tensor.shape == (4, 6, 64)
    assert tensor[2].shape == (6, 64)
    assert tensor[1:3].shape == (2, 6, 64)
    assert torch.equal(decode(tensor[2]), decode(tensor)[2])
    assert tensor.nbytes == 4 * 6 * 2 * MXFP4.bytes_per_block
    assert tensor.to("cpu").device == torch.device("cpu")


def test_refusals() -> None:
    with pytest.raises(Unsupported, match="multiple of 32"):
        encode(torch.zeros(33), MXFP4)
    with pytest.raises(Unsupported, match="floating-point"):
        encode(torch.zeros(32, dtype=torch.int32), MXFP8)
    with pytest.raises(Unsupported, match="do not belong together"):
        BlockScaled(torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8), MXFP4)
    with pytest.raises(Unsupported, match="are bytes"):
        BlockScaled(torch.zeros(2, 16), torch.zeros(2, 1, dtype=torch.uint8), MXFP4)
    with pytest.raises(Unsupported, match="no axis"):
        encode(torch.zeros(32), MXFP4)[0]
    with pytest.raises(Unsupported, match="mxfp4, mxfp8, nvfp4, fp8_block"):
        block_format("nvfp8")
