"""NVFP4: every code under every scale, the published rule of encoding, and both conventions of the global scale."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from microscale.errors import Unsupported
from microscale.formats import MXFP4, NVFP4, BlockScaled, decode, encode
from microscale.formats.mxfp4 import VALUES, pack_nibbles, unpack_nibbles
from microscale.formats.nvfp4 import LARGEST

BLOCK = NVFP4.block


def e4m3(code: int) -> float:
    """From the definition: sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 7
    if exponent == 0xF and mantissa == 7:
        return math.nan
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


@pytest.mark.parametrize("scale", [1.0, 2.0**-13, 0.1, 3e4, 2.0**-126], ids=str)
def test_decode_is_exact_for_every_code_and_scale(scale: float) -> None:
    held = struct.unpack("f", struct.pack("f", scale))[0]
    values = pack_nibbles(torch.arange(16, dtype=torch.uint8)).expand(256, -1).contiguous()
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    tensor = BlockScaled(values, scales, NVFP4, torch.full((256,), scale))
    expected = torch.tensor([[v * e4m3(s) * held for v in VALUES] for s in range(256)], dtype=torch.float64)
    torch.testing.assert_close(decode(tensor, torch.float64), expected, rtol=0, atol=0, equal_nan=True)
    # The other types hold the product of the exact numbers, rounded.
    torch.testing.assert_close(decode(tensor), expected.float(), rtol=0, atol=0, equal_nan=True)
    number = ~expected.isnan()
    assert torch.equal(torch.signbit(decode(tensor)[number]), torch.signbit(expected[number]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_code_times_scale_is_exact_in_16_bits(dtype: torch.dtype) -> None:
    """So kernels may multiply in 16 bits and apply the global scale to the sum."""
    values = pack_nibbles(torch.arange(16, dtype=torch.uint8)).expand(127, -1).contiguous()
    tensor = BlockScaled(values, torch.arange(127, dtype=torch.uint8)[:, None], NVFP4, torch.ones(127))
    assert torch.equal(decode(tensor, dtype).double(), decode(tensor, torch.float64))


# By hand. The largest magnitude is 10.5, so the global scale is 10.5 / 2688 = 0.00390625 = 2**-8. First block: largest
# 10.5 over 6 is 1.75, over 2**-8 is 448, E4M3 code 0x7E; then values are multiples of 1.75. Second block: largest 3.5,
# 3.5 / 6 * 256 = 149.33, between 144 and 160, so 144 (0x71): one step is 0.5625. 3.5 / 0.5625 = 6.2 → 6;
# 1.0 → 1.78 → 2; -0.14 → -0.25, a tie between 0 and -0.5 → -0 (even).
X = [[10.5, 5.25, -1.75, 0.0, 0.875, 2.625, -7.0, -10.5] + [0.0] * 8, [3.5, 1.0, -0.140625] + [0.0] * 13]
CODES = [[7, 5, 10, 0, 1, 3, 14, 15] + [0] * 8, [7, 4, 8] + [0] * 13]
BYTES = [[0x57, 0x0A, 0x31, 0xFE, 0, 0, 0, 0], [0x47, 0x08, 0, 0, 0, 0, 0, 0]]
SCALES = [[0x7E], [0x71]]
MULTIPLY_BY = 2.0**-8
DIVIDE_BY = 256.0
NUMBERS = [[10.5, 5.25, -1.75, 0.0, 0.875, 2.625, -7.0, -10.5], [3.375, 1.125, -0.0]]


def test_the_published_rule_by_hand() -> None:
    tensor = encode(torch.tensor(X), NVFP4)
    assert tensor.row_scales is not None
    assert tensor.row_scales.tolist() == [MULTIPLY_BY] * 2
    assert tensor.scales.tolist() == SCALES
    assert unpack_nibbles(tensor.values).tolist() == CODES
    assert tensor.values.tolist() == BYTES  # the low nibble is the even element
    for row, numbers in zip(decode(tensor).tolist(), NUMBERS, strict=True):
        assert row[: len(numbers)] == numbers


def test_the_global_scale_is_multiplied() -> None:
    """``weight_scale_2`` as it is, ``weight_global_scale`` as its inverse; the wrong one is off by 65536."""
    values, scales = torch.tensor(BYTES, dtype=torch.uint8), torch.tensor(SCALES, dtype=torch.uint8)

    def first(row_scale: float) -> float:
        return float(decode(BlockScaled(values, scales, NVFP4, torch.full((2,), row_scale)))[0, 0])

    assert first(MULTIPLY_BY) == first(1 / DIVIDE_BY) == 10.5
    assert first(DIVIDE_BY) == 10.5 * 65536


def test_each_matrix_has_its_own_global_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, 2 * BLOCK, generator=generator) * torch.tensor([1.0, 1e-3, 1e3])[:, None, None]
    tensor = encode(x, NVFP4)
    assert tensor.row_scales is not None
    assert torch.equal(tensor.row_scales, (x.abs().amax(dim=(1, 2)) / LARGEST)[:, None].expand(3, 4))
    for place in range(3):
        assert torch.equal(decode(encode(x[place], NVFP4)), decode(tensor)[place])
    error = (decode(tensor) - x).norm(dim=(1, 2)) / x.norm(dim=(1, 2))
    assert (error < 0.11).all()  # normal weights: 9.5 to 9.6 % in the published encoders


def test_error_is_within_the_step_of_each_block() -> None:
    x = torch.randn(256, 8 * BLOCK, generator=torch.Generator().manual_seed(2))
    blocks, decoded = x.view(256, 8, BLOCK), decode(encode(x, NVFP4)).view(256, 8, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    # Half of the largest step, 2 of 6, and what the scale's own rounding (1/16) cuts off the largest value.
    assert ((decoded - blocks).abs() <= largest * (1 / 6 + 1 / 16)).all()


def test_what_was_decoded_encodes_to_itself() -> None:
    once = decode(encode(torch.randn(64, 4 * BLOCK, generator=torch.Generator().manual_seed(1)), NVFP4))
    again = encode(once, NVFP4)
    torch.testing.assert_close(decode(again), once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_bad_number_becomes_nan_and_no_other(bad: float) -> None:
    x = torch.ones(3, 2 * BLOCK)
    x[1, BLOCK + 5] = bad
    tensor = encode(x, NVFP4)
    assert tensor.scales[1, 1] == 0x7F
    decoded = decode(tensor)
    assert decoded[1, BLOCK:].isnan().all()
    decoded[1, BLOCK:] = 1.0
    torch.testing.assert_close(decoded, torch.ones(3, 2 * BLOCK), rtol=1e-6, atol=0)


def test_zeros_and_the_smallest_scales() -> None:
    x = torch.zeros(2, 2 * BLOCK)
    x[0, 3] = -0.0
    tensor = encode(x, NVFP4)
    assert tensor.row_scales is not None
    assert tensor.row_scales.tolist() == [1.0, 1.0]
    assert tensor.scales.tolist() == [[0x38, 0x38]] * 2  # 1.0, as nvidia-modelopt has it
    assert torch.equal(torch.signbit(decode(tensor)), torch.signbit(x))
    x[0, 0], x[1, 0] = 1.0, 1e-9
    tensor = encode(x, NVFP4)
    assert tensor.scales[1, 0] == 1  # 2**-9, not 0
    assert decode(tensor)[1, 0] == 0


def test_parts_stay_together() -> None:
    tensor = encode(torch.randn(4, 6, 2 * BLOCK), NVFP4)
    assert tensor.shape == (4, 6, 32)
    assert torch.equal(decode(tensor[2]), decode(tensor)[2])
    assert torch.equal(decode(tensor[0][2:4]), decode(tensor)[0, 2:4])
    assert tensor.nbytes == 4 * 6 * (2 * NVFP4.bytes_per_block + 4)
    assert NVFP4.bits_per_value == 4.5
    assert tensor.to("cpu").device == torch.device("cpu")
    assert encode(torch.randn(2 * BLOCK), NVFP4).shape == (32,)


def test_refusals() -> None:
    values, scales = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    with pytest.raises(Unsupported, match="nvfp4 has one float32 scale per row"):
        BlockScaled(values, scales, NVFP4)
    with pytest.raises(Unsupported, match=r"one float32 scale per row, not \(1,\)"):
        BlockScaled(values, scales, NVFP4, torch.ones(1))
    with pytest.raises(Unsupported, match="mxfp4 has no float32 scale per row"):
        BlockScaled(values, scales[:, :1], MXFP4, torch.ones(2))
    with pytest.raises(Unsupported, match="one scale per 16 values"):
        BlockScaled(values, scales[:, :1], NVFP4, torch.ones(2))
    with pytest.raises(Unsupported, match="multiple of 16"):
        encode(torch.zeros(24), NVFP4)
