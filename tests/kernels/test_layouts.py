"""The packed layout: every bit comes back, and every weight stands where the kernels look for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from microscale.errors import BadCheckpoint, Unsupported
from microscale.formats import (
    FP8_BLOCK,
    MXFP4,
    MXFP8,
    NVFP4,
    BlockFormat,
    BlockScaled,
    ChannelScaled,
    block_format,
    decode,
)
from microscale.formats.mxfp4 import unpack_nibbles
from microscale.kernels.dense.packed import pack as pack_dense
from microscale.kernels.dense.spec import DenseWeights
from microscale.kernels.layouts import (
    MAX_SCALE,
    Findings,
    RowOrder,
    layout_name,
    pack,
    pack_rows,
    packed_bytes,
    unpack,
)
from microscale.kernels.moe.packed import pack_experts
from microscale.kernels.moe.spec import Gate, GateKind, MoeWeights

FORMATS = [MXFP4, MXFP8, NVFP4, FP8_BLOCK]


def random_tensor(fmt: BlockFormat, experts: int, rows: int, k: int, seed: int = 0) -> BlockScaled:
    generator = torch.Generator().manual_seed(seed)
    # Every MXFP8 byte but the two NaNs, which no checkpoint may hold.
    high = 256 if fmt.bits == 4 else 0x7F
    values = torch.randint(0, high, (experts, rows, k * fmt.bits // 8), dtype=torch.uint8, generator=generator)
    if fmt is FP8_BLOCK:  # bf16's, over a hundred octaves
        exponents = torch.randint(-50, 50, (experts, rows, k // fmt.block), generator=generator)
        return BlockScaled(values, torch.rand(exponents.shape, generator=generator).bfloat16() * 2.0**exponents, fmt)
    # Every scale of the MX formats that is not refused, every positive number of E4M3.
    low, high = (1, 0x7F) if fmt is NVFP4 else (0, MAX_SCALE + 1)
    scales = torch.randint(low, high, (experts, rows, k // fmt.block), dtype=torch.uint8, generator=generator)
    row_scales = torch.rand(experts, rows, generator=generator) if fmt is NVFP4 else None
    return BlockScaled(values, scales, fmt, row_scales)


def check_same(back: BlockScaled, tensor: BlockScaled) -> None:
    assert torch.equal(back.values, tensor.values)
    assert torch.equal(back.scales, tensor.scales)
    if tensor.row_scales is not None:
        assert back.row_scales is not None
        assert torch.equal(back.row_scales, tensor.row_scales)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("k", [32, 64, 96, 704, 2880])
def test_unpacking_gives_back_every_bit(fmt: BlockFormat, order: RowOrder, k: int) -> None:
    tensor = random_tensor(fmt, 2, 48, k)
    check_same(unpack(pack(tensor, order)), tensor)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from(RowOrder),
    st.sampled_from((MXFP4, NVFP4)),
    st.integers(0, 1000),
)
def test_unpacking_gives_back_any_shape(
    experts: int, row_tiles: int, groups: int, order: RowOrder, fmt: BlockFormat, seed: int
) -> None:
    tensor = random_tensor(fmt, experts, 16 * row_tiles, 32 * groups, seed)
    check_same(unpack(pack(tensor, order)), tensor)


def packed_row(row: int, rows: int, order: RowOrder) -> int:
    """Where the module's text says that a checkpoint row goes."""
    if order is RowOrder.PLAIN:
        return row
    unit, half = (row // 2, row % 2) if order is RowOrder.INTERLEAVED else (row % (rows // 2), row // (rows // 2))
    return unit // 8 * 16 + half * 8 + unit % 8


@pytest.mark.parametrize("order", RowOrder)
def test_mxfp4_code_stands_at_the_documented_bits(order: RowOrder) -> None:
    rows, k = 64, 160
    tensor = random_tensor(MXFP4, 1, rows, k)
    packed = pack(tensor, order)
    codes = unpack_nibbles(tensor.values[0])
    # field → positions of sign, c, b, a in its half-word; the sign of field 2 is in the other one
    places = {0: (15, 8, 7, 6), 1: (9, 2, 1, 0), 2: (5, 14, 13, 12), 3: (11, 4, 3, 10)}
    generator = torch.Generator().manual_seed(1)
    for _ in range(400):
        row = int(torch.randint(0, rows, (), generator=generator))
        column = int(torch.randint(0, k, (), generator=generator))
        at = packed_row(row, rows, order)
        tile, g, h = at // 16, at % 8, at // 8 % 2
        t, group, i = column % 32 // 8, column // 32 % 2, column % 8
        word = int(packed.words[0, tile, column // 64, 4 * g + t, 2 * group + h]) & 0xFFFFFFFF
        field, half = i // 2, i % 2
        sign, *magnitude = places[field]
        code = word >> (16 * (1 - half if field == 2 else half) + sign) & 1
        for place in magnitude:
            code = code << 1 | word >> (16 * half + place) & 1
        assert code == int(codes[row, column])
        scale = int(packed.scales[0, tile, column // 64, g]) & 0xFFFFFFFF
        assert scale >> 8 * (2 * group + h) & 0xFF == int(tensor.scales[0, row, column // 32])


@pytest.mark.parametrize("order", RowOrder)
def test_nvfp4_scales_stand_where_documented(order: RowOrder) -> None:
    """Every positive number of E4M3 as a byte without subnormals, by lane, and the row's scale behind the last tile."""
    rows, k = 32, 96
    tensor = random_tensor(NVFP4, 1, rows, k)
    tensor.scales.view(-1)[:126] = torch.arange(1, 127, dtype=torch.uint8)
    assert tensor.row_scales is not None
    numbers = tensor.scales.view(torch.float8_e4m3fn).float()
    packed = pack(tensor, order)
    assert packed.scales.shape == (1, 2, 3, 16)
    for row in range(rows):
        at = packed_row(row, rows, order)
        tile, g, h = at // 16, at % 8, at // 8 % 2
        assert packed.scales[0, tile, 2, 8 * h + g].view(torch.float32) == tensor.row_scales[0, row]
        for block in range(k // 16):
            group, p = block // 2, block % 2
            word = int(packed.scales[0, tile, group // 2, 2 * g + p]) & 0xFFFFFFFF
            byte = word >> 8 * (2 * (group % 2) + h) & 0xFF
            assert (1 + byte % 8 / 8) * 2.0 ** (byte // 8 - 10) == numbers[0, row, block]


@pytest.mark.parametrize("order", RowOrder)
def test_factors_of_fp8_blocks_stand_where_documented(order: RowOrder) -> None:
    rows, k = 32, 96
    tensor = random_tensor(FP8_BLOCK, 1, rows, k)
    packed = pack(tensor, order)
    assert packed.scales.shape == (1, 2, 3, 16)
    for row in range(rows):
        at = packed_row(row, rows, order)
        tile, g, h = at // 16, at % 8, at // 8 % 2
        whole = packed.scales[0, tile, 2, 8 * h + g].view(torch.float32)
        assert whole <= tensor.scales[0, row].max() < 2 * whole
        for group in range(k // 32):
            word = packed.scales[0, tile, group // 2, 2 * g + group % 2 : 2 * g + group % 2 + 1]
            assert word.view(torch.bfloat16)[h] * 2.0**-56 * whole == tensor.scales[0, row, group]


def test_scales_of_whole_rows_are_exact_and_others_are_rounded_once() -> None:
    tensor = random_tensor(FP8_BLOCK, 1, 32, 96)
    scales = torch.rand(1, 32, 3, generator=torch.Generator().manual_seed(1)) + 0.01
    scales[:, ::2] = scales[:, ::2, :1]
    back = unpack(pack(BlockScaled(tensor.values, scales, FP8_BLOCK), RowOrder.HALVES)).scales
    assert torch.equal(back[:, ::2], scales[:, ::2])
    assert (back / scales - 1).abs().max() <= 2.0**-8


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_of_fp8_blocks_is_a_number(bad: float) -> None:
    tensor = random_tensor(FP8_BLOCK, 2, 32, 96)
    tensor.scales[1, 3, 2] = bad
    with pytest.raises(BadCheckpoint, match="Expert 1 has a NaN among its scales"):
        pack(tensor, RowOrder.PLAIN)


def test_nvfp4_codes_stand_as_mxfp4_does() -> None:
    tensor, like = random_tensor(NVFP4, 2, 32, 160), random_tensor(MXFP4, 2, 32, 160)
    mxfp4 = BlockScaled(tensor.values, like.scales, MXFP4)
    assert torch.equal(pack(tensor, RowOrder.HALVES).words, pack(mxfp4, RowOrder.HALVES).words)


def test_nvfp4_scales_of_zero_and_below_give_the_same_numbers() -> None:
    tensor = random_tensor(NVFP4, 2, 16, 64)
    tensor.scales[0, 3], tensor.scales[0, 4], tensor.scales[1] = 0, 0x80, tensor.scales[1] | 0x80
    back = unpack(pack(tensor, RowOrder.PLAIN))
    assert torch.equal(decode(back), decode(tensor))  # 0 and -0 are equal
    assert (back.scales < 0x80).all()


def test_mxfp8_byte_stands_where_documented() -> None:
    rows, k = 32, 96
    tensor = random_tensor(MXFP8, 1, rows, k)
    packed = pack(tensor, RowOrder.PLAIN)
    byte_of = (1, 3, 0, 2)
    for row in range(0, rows, 3):
        for column in range(k):
            t, group, i = column % 32 // 8, column // 32 % 2, column % 8
            lane, h = 4 * (row % 8) + t, row // 8 % 2
            word = int(packed.words[0, row // 16, column // 64, group, lane, 2 * (i // 4) + h]) & 0xFFFFFFFF
            assert word >> 8 * byte_of[i % 4] & 0xFF == int(tensor.values[0, row, column])


@pytest.mark.parametrize("order", RowOrder)
def test_biases_follow_their_rows(order: RowOrder) -> None:
    bias = torch.arange(64.0)[None] + torch.tensor([[0.0], [100.0]])
    packed = pack_rows(bias, order)
    for row in range(64):
        assert packed[1, packed_row(row, 64, order)] == bias[1, row]


def test_the_filling_of_an_odd_tile_is_zero() -> None:
    packed = pack(random_tensor(MXFP4, 1, 16, 96), RowOrder.PLAIN)
    assert packed.k_tiles == 2
    assert (packed.words[0, :, 1, :, 2:] == 0).all()
    assert (packed.scales[0, :, 1] >> 16 == 0).all()


def test_packing_takes_only_what_the_weights_take() -> None:
    tensor = random_tensor(MXFP4, 2, 32, 128)
    packed = pack(tensor, RowOrder.PLAIN)
    peaks = 2 * 32 * 2  # two bytes a row
    assert packed.nbytes == tensor.nbytes + peaks == packed_bytes(MXFP4, 2, 32, 128)
    assert packed.layout == layout_name(MXFP4) == "mxfp4_fragments_16x64"
    assert (packed.num_experts, packed.rows, packed.k) == tensor.shape


def test_packed_nvfp4_takes_what_the_checkpoint_takes() -> None:
    tensor = random_tensor(NVFP4, 2, 32, 128)
    packed = pack(tensor, RowOrder.PLAIN)
    assert packed.nbytes == tensor.nbytes == packed_bytes(NVFP4, 2, 32, 128)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_among_nvfp4_scales_is_refused(byte: int) -> None:
    tensor = random_tensor(NVFP4, 2, 16, 64)
    tensor.scales[1, 3, 1] = byte
    with pytest.raises(BadCheckpoint, match="Expert 1 has a NaN among its scales"):
        pack(tensor, RowOrder.PLAIN)


def test_a_nan_for_a_row_scale_is_refused() -> None:
    tensor = random_tensor(NVFP4, 2, 16, 64)
    assert tensor.row_scales is not None
    tensor.row_scales[1] = torch.nan
    with pytest.raises(BadCheckpoint, match="nvfp4 weight has a NaN"):
        pack(tensor, RowOrder.PLAIN)


def with_scale(byte: int) -> BlockScaled:
    tensor = random_tensor(MXFP4, 2, 16, 64)
    tensor.scales[1, 3, 1] = byte
    return tensor


def test_a_nan_scale_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="Expert 1 has a NaN among its scales"):
        pack(with_scale(255), RowOrder.PLAIN)


def test_a_scale_beyond_the_kernels_range_is_refused() -> None:
    pack(with_scale(MAX_SCALE), RowOrder.PLAIN)
    with pytest.raises(BadCheckpoint, match=r"group scale of 2\*\*66"):
        pack(with_scale(MAX_SCALE + 1), RowOrder.PLAIN)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_among_mxfp8_values_is_refused(byte: int) -> None:
    tensor = random_tensor(MXFP8, 1, 16, 64)
    tensor.values[0, 2, 5] = byte
    with pytest.raises(BadCheckpoint, match="Expert 0 has a NaN among its values"):
        pack(tensor, RowOrder.PLAIN)


def test_odd_shapes_are_refused() -> None:
    with pytest.raises(Unsupported, match="multiple of 16 rows, not 24"):
        pack(random_tensor(MXFP4, 1, 24, 64), RowOrder.PLAIN)
    codes, scales = (torch.zeros(1, 16, n, dtype=torch.uint8) for n in (24, 3))
    odd = BlockScaled(codes, scales, NVFP4, torch.ones(1, 16))
    with pytest.raises(Unsupported, match="multiple of 32 columns, not 48"):
        pack(odd, RowOrder.PLAIN)
    with pytest.raises(Unsupported, match="three axes"):
        pack(random_tensor(MXFP4, 1, 16, 64)[0], RowOrder.PLAIN)


# -- what packing costs the host


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each wait for the device. On tensors without numbers any other read by the host is an error."""
    found: list[int] = []
    monkeypatch.setattr(Findings, "refuse", lambda self: found.append(len(self._tensors)))
    return found


def fake(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def test_an_expert_layer_waits_for_the_device_once(waits: list[int]) -> None:
    """Sixteen experts of gpt-oss's size, which are packed in six chunks."""
    with FakeTensorMode():
        gate_up = BlockScaled(fake(16, 5760, 1440), fake(16, 5760, 90), MXFP4)
        down = BlockScaled(fake(16, 2880, 1440), fake(16, 2880, 90), MXFP4)
        biases = (fake(16, 5760, dtype=torch.bfloat16), fake(16, 2880, dtype=torch.bfloat16))
        packed = pack_experts(MoeWeights(gate_up, down, *biases), Gate(GateKind.SWIGLU_CLAMPED, interleaved=True))
    assert packed.gate_up.words.shape == (16, 360, 45, 32, 4)
    assert waits == [2]


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8", "fp8"])
def test_a_dense_layer_waits_for_the_device_once(fmt: str, waits: list[int]) -> None:
    """Sizes of gpt-oss's lm_head, which is packed in 13 chunks of rows."""
    rows, k = 201088, 2880
    with FakeTensorMode():
        if fmt == "fp8":
            weight: BlockScaled | ChannelScaled = ChannelScaled(fake(rows, k), fake(rows, dtype=torch.float32))
        else:
            bits = block_format(fmt).bits
            weight = BlockScaled(fake(rows, k * bits // 8), fake(rows, k // 32), block_format(fmt))
        packed = pack_dense(DenseWeights(weight))
    assert packed.rows == rows
    assert len(waits) == 1


def test_a_host_read_is_seen() -> None:
    """What the two tests above rely on."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        pack(BlockScaled(fake(2, 32, 32), fake(2, 32, 2), MXFP4), RowOrder.PLAIN)


def test_findings_of_several_tensors_keep_their_experts_numbers() -> None:
    good, bad = random_tensor(MXFP4, 3, 16, 64), random_tensor(MXFP4, 3, 16, 64)
    bad.scales[2, 5, 1] = 255
    findings = Findings()
    pack(good, RowOrder.PLAIN, None, findings)
    pack(bad, RowOrder.PLAIN, None, findings)
    with pytest.raises(BadCheckpoint, match="Expert 2 has a NaN among its scales"):
        findings.refuse()
