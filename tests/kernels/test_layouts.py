"""The packed layout: every bit comes back, and every weight stands where the kernels look for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from microscale.errors import BadCheckpoint, Unsupported
from microscale.formats import MXFP4, MXFP8, BlockFormat, BlockScaled, ChannelScaled, block_format
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

FORMATS = [MXFP4, MXFP8]


def random_tensor(fmt: BlockFormat, experts: int, rows: int, k: int, seed: int = 0) -> BlockScaled:
    generator = torch.Generator().manual_seed(seed)
    # Every MXFP8 byte but the two NaNs, which no checkpoint may hold.
    high = 256 if fmt is MXFP4 else 0x7F
    values = torch.randint(0, high, (experts, rows, k * fmt.bits // 8), dtype=torch.uint8, generator=generator)
    scales = torch.randint(0, MAX_SCALE + 1, (experts, rows, k // 32), dtype=torch.uint8, generator=generator)
    return BlockScaled(values, scales, fmt)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("order", RowOrder)
@pytest.mark.parametrize("k", [32, 64, 96, 704, 2880])
def test_unpacking_gives_back_every_bit(fmt: BlockFormat, order: RowOrder, k: int) -> None:
    tensor = random_tensor(fmt, 2, 48, k)
    back = unpack(pack(tensor, order))
    assert torch.equal(back.values, tensor.values)
    assert torch.equal(back.scales, tensor.scales)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.sampled_from(RowOrder), st.integers(0, 1000))
def test_unpacking_gives_back_any_shape(experts: int, row_tiles: int, groups: int, order: RowOrder, seed: int) -> None:
    tensor = random_tensor(MXFP4, experts, 16 * row_tiles, 32 * groups, seed)
    back = unpack(pack(tensor, order))
    assert torch.equal(back.values, tensor.values)
    assert torch.equal(back.scales, tensor.scales)


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
