"""FP8 with one scale per channel: rounding, scales, edge cases."""

from __future__ import annotations

import math

import pytest
import torch

from microscale.errors import Unsupported
from microscale.formats import FP8_BLOCK, BlockScaled, ChannelScaled, decode, encode, encode_channels
from microscale.formats.fp8 import SMALLEST_SCALE
from microscale_lab.cases.errors import step


def test_every_code_survives_its_own_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F].repeat(3, 1)  # without the two NaN
    scales = torch.tensor([1.0, 0.37, 2.0**-100])
    tensor = ChannelScaled(codes, scales)
    again = encode_channels(decode(tensor, torch.float64))
    # The largest code is 448, so the scale is found again; -0 and 0 keep their signs.
    torch.testing.assert_close(again.scales, scales, rtol=1e-7, atol=0)
    assert torch.equal(again.values, codes)


def test_the_error_is_a_rounding_to_e4m3() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 64)[:, None]
    tensor = encode_channels(x)
    error = (decode(tensor) - x).abs()
    # A normal code is within half a step of its number; below 2**-6 of the scale codes are 2**-9 apart.
    allowed = torch.maximum(step("e4m3") * x.abs(), tensor.scales[:, None] * 2.0**-10)
    assert (error <= allowed * (1 + 1e-6)).all()
    largest = x.abs().argmax(dim=-1, keepdim=True)
    torch.testing.assert_close(decode(tensor).gather(1, largest), x.gather(1, largest), rtol=1e-6, atol=0)


def test_ties_go_to_the_even_code() -> None:
    # At scale 1 the codes around 17 are 16 and 18, around 19 they are 18 and 20.
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0]])
    assert decode(encode_channels(x)).tolist() == [[448.0, 16.0, 20.0, -16.0]]


def test_zeros_keep_their_sign_and_get_scale_one() -> None:
    tensor = encode_channels(torch.tensor([[0.0, -0.0], [1.0, -0.0]]))
    assert tensor.scales[0] == 1.0
    assert tensor.values.tolist() == [[0, 0x80], [0x7E, 0x80]]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_broken_row_is_seen_and_stays_alone(bad: float) -> None:
    x = torch.ones(3, 4)
    x[1, 2] = bad
    y = decode(encode_channels(x))
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], x[[0, 2]])


def test_tiny_rows_keep_a_normal_scale() -> None:
    tensor = encode_channels(torch.full((1, 2), 1e-40))
    assert tensor.scales[0] == SMALLEST_SCALE
    assert (decode(tensor) - 1e-40).abs().max() <= SMALLEST_SCALE * 2.0**-10
    assert encode_channels(torch.tensor([[3.4e38]])).scales.isfinite().all()


def test_shapes_and_slices() -> None:
    tensor = encode_channels(torch.randn(6, 8))
    assert tensor.shape == (6, 8)
    assert tensor.nbytes == 6 * 8 + 6 * 4
    assert torch.equal(decode(tensor[2:4]), decode(tensor)[2:4])
    assert encode_channels(torch.empty(0, 8)).shape == (0, 8)
    assert encode_channels(torch.empty(2, 0)).scales.tolist() == [1.0, 1.0]
    assert decode(tensor, torch.bfloat16).dtype == torch.bfloat16


def test_refusals() -> None:
    with pytest.raises(Unsupported, match=r"bytes and scales float32, not torch\.int8"):
        ChannelScaled(torch.zeros(2, 4, dtype=torch.int8), torch.ones(2))
    with pytest.raises(Unsupported, match="one scale per row"):
        ChannelScaled(torch.zeros(2, 4, dtype=torch.uint8), torch.ones(3))
    with pytest.raises(Unsupported, match="no axis"):
        ChannelScaled(torch.zeros(4, dtype=torch.uint8), torch.ones(()))[0]
    with pytest.raises(Unsupported, match=r"not torch\.int64"):
        encode_channels(torch.ones(2, 4, dtype=torch.int64))


def test_blocks_hold_e4m3_under_any_scale() -> None:
    """What FP8 checkpoints have: exact under scales of blocks, rows or matrices, and found again by encoding."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).repeat(3, 1)
    scales = torch.tensor([1.0, 0.37, 2.0**-100])[:, None].repeat(1, 8)
    tensor = BlockScaled(codes, scales, FP8_BLOCK)
    expected = codes.view(torch.float8_e4m3fn).double() * scales.double().repeat_interleave(32, dim=1)
    assert torch.equal(decode(tensor, torch.float64), expected)
    assert torch.equal(decode(tensor), expected.float())
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    once = decode(encode(x, FP8_BLOCK))
    assert ((once - x).abs() <= x.abs() * 2**-4 + x.abs().max() * 2**-17).all()
    torch.testing.assert_close(decode(encode(once, FP8_BLOCK)), once, rtol=1e-6, atol=0)
    x[3, 40] = math.nan
    x[5] = 0
    bad = decode(encode(x, FP8_BLOCK))
    assert bad[3, 32:].isnan().all()
    assert bad.isnan().sum() == 32
    assert not bad[5].any()
    with pytest.raises(Unsupported, match="fp8_block has bytes and float32 scales"):
        BlockScaled(codes, codes[:, :8], FP8_BLOCK)
