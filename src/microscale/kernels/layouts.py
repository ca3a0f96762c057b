"""Physical layouts of expert weights: what the kernels read, made once at load, straight from checkpoint bytes.

There is one layout per weight format, and every expert kernel reads it (the small-batch kernel, the grouped kernels,
the 8-bit ones), so weights are never held twice. It is made for ``mma.sync`` m16n8k16 with the *weights on the left*:
a warp owns tiles of 16 rows by 64 K, each lane finds its own fragment in one 16-byte load, and neither shared memory
nor a shuffle comes between memory and the matrix units. ``wgmma`` takes its left operand from registers in the same
fragments.

Tiles
-----
Packed row ``16 R + 8 h + g`` and column ``64 T + 32 G + 8 t + i`` of an expert lie in tile (R, T), lane ``4 g + t``,
with h, G in 0..1, g, i in 0..7, t in 0..3: a lane owns rows g and g + 8, and of each group of 32 the eight consecutive
columns from 8 t. (A group's columns may meet the matrix unit in any order, because the tokens' loads follow the same
order: a lane reads its eight activations as one 16-byte load too.)

             K = 64 T ...
             |---------- group G = 0 ----------|---------- group G = 1 ----------|
    row      | 0..7    8..15   16..23  24..31  | 32..39  40..47  48..55  56..63  |
    g        | t=0 v0  t=1 v0  t=2 v0  t=3 v0  | t=0 v2  t=1 v2  t=2 v2  t=3 v2  |   h = 0   (gate of unit 8 R + g)
    g + 8    | t=0 v1  t=1 v1  t=2 v1  t=3 v1  | t=0 v3  t=1 v3  t=2 v3  t=3 v3  |   h = 1   (up of unit 8 R + g)

``v = 2 G + h`` numbers a lane's four (row, group) pairs. Scales: one 32-bit word per (R, T, g), whose byte v is the
E8M0 byte of pair v.

    scales  int32 [experts, R, T, 8]                 byte v = 2 G + h

MXFP4 also has the largest scale byte of each row, for matrix units that sum over all of K in E4M3 (``wgmma``):

    peaks   int32 [experts, R, 8]                    half-word h = 0x400B less the largest byte of row 16 R + 8 h + g

NVFP4 has a scale for each 16 columns, so lanes t = 0, 1 and t = 2, 3 have words of their own, p = t // 2:

    scales  int32 [experts, R, T + 1, 16 = 2 g + p]  byte v = 2 G + h; place 8 h + g of the last: the row's scale

A byte is the E4M3 scale without subnormals: ``(1 + m / 8) * 2**(e - 10)`` from five bits e and three bits m, so that
the bits of a bf16 factor follow by one shift and one addition. E4M3's positive numbers have binary exponents from -9 to
8: all are there. Byte 0 is the scale 0, and its codes are zeros. A negative scale becomes positive, and the signs of
its codes change. Behind the last tile of a row tile are the float32 scales of its 16 rows, which apply to sums.

FP8 under float32 scales of blocks has bf16 factors, for which a lane has two words, of the groups G:

    scales  int32 [experts, R, T + 1, 16 = 2 g + G]  half-word h; place 8 h + g of the last: the row's scale

A factor is the group's scale over the row's, times 2**56. The row's scale is the power of two below its largest one, so
that bf16 scales (Qwen's) stay exact and others are rounded to bf16; or that scale itself where all of the row are equal
(FP8 with a scale for each row or matrix), which is exact.

MXFP4 and NVFP4: one 32-bit word holds the eight codes of one pair; a lane's 16 bytes are its four pairs.

    words   int32 [experts, R, T, 32 lanes, 4 = v]

Column i = 2 f + p of the pair is field f of half-word p. Bits are placed so that nine integer operations make eight
bf16 numbers E2M1 * 2**-126 (sign at bit 15, the code's three low bits at bits 8..6 of each half; see
``fragments_jit.py``):

    bit of half p   15  14  13  12  11  10   9   8   7   6   5   4   3   2   1   0
    field           0s  2c  2b  2a  3s  3a  1s  0c  0b  0a  2s* 3c  3b  1c  1b  1a

    field 0: w              (in place)            f: sign s and magnitude bits c b a (c highest)
    field 1: w << 6                               * the sign of field 2 is in the *other* half-word, because
    field 2: w rotated right by 6                   the rotation carries it over
    field 3: w << 4 (s, c, b) and w >> 4 (a)

MXFP8 and FP8 blocks: one 32-bit word holds four E4M3 bytes; a lane's 16 bytes are the pairs of one group, both rows.

    words   int32 [experts, R, T, 2 = G, 32 lanes, 4 = 2 j + h]     columns i = 4 j .. 4 j + 3

    byte of word     3     2     1     0
    column - 4 j     1     3     0     2          bytes 3 and 1 make the bf16 pair (0, 1), bytes 2 and 0 the pair (2, 3)

Row order
---------
``gate_up`` puts the gate rows of units 8 R .. 8 R + 7 in the upper half of tile R and their up rows in the lower half,
whether the checkpoint interleaves them (gpt-oss) or stacks them (Gemma): a lane then holds gate and up of one unit and
applies the activation in registers. ``down`` keeps its order. Biases follow their rows (``pack_rows``).

Edges
-----
Rows must be a multiple of 16. K must be a multiple of 32; if it is odd in groups, the last tile is filled with zero
codes and scale bytes 0. NaN is refused (scale 255, E4M3 0x7F and 0xFF), and so is an E8M0 scale above 192, over 2**65:
the grouped kernels fold the scale into bf16 weights less 2**64, which the activations carry, and 192 is the last that
fits. At the other end a weight below 2**-62 (a group scale under 2**-61) may lose bits or read as zero: an error of at
most 2**-62.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from microscale.errors import BadCheckpoint, Unsupported
from microscale.formats import BLOCK, FP8_BLOCK, MXFP4, MXFP8, NVFP4, SCALE_NAN, BlockFormat, BlockScaled
from microscale.kernels.numbers import FRAGMENT_ROWS, PEAK_BIAS

if TYPE_CHECKING:
    from torch import Tensor

TILE_ROWS = FRAGMENT_ROWS
TILE_K = 64
LANES = 32
ROW_SCALED = (NVFP4.name, FP8_BLOCK.name)
"""Formats with float32 scales of rows behind 16 scale words a tile; the others have 8."""
FACTOR = float(1 << 56)
"""Of FP8 blocks' bf16 factors."""
MAX_SCALE = 192
"""The largest scale byte that every kernel can fold into bf16."""
CHUNK_BYTES = 32 << 20
"""Of checkpoint bytes that are packed together."""

# Field f of a half-word: where its sign and its magnitude bits c, b, a are; `True`: the sign is in the other half.
_FIELDS = ((15, (8, 7, 6), False), (9, (2, 1, 0), False), (5, (14, 13, 12), True), (11, (4, 3, 10), False))
_E5M3_OFFSET = (127 - 10) << 3
"""A float32's exponent and upper three mantissa bits, less those of NVFP4's packed scale."""
# Column i of an MXFP8 word's four → its byte.
_BYTES = (1, 3, 0, 2)


class RowOrder(StrEnum):
    """How the checkpoint arranges the rows that a layout packs."""

    PLAIN = "plain"
    """``down``: rows keep their order."""
    INTERLEAVED = "interleaved"
    """``gate_up`` with gate rows even and up rows odd (gpt-oss)."""
    HALVES = "halves"
    """``gate_up`` with all gate rows, then all up rows (Gemma)."""


@dataclass(frozen=True)
class Packed:
    """One stack of expert matrices ``[experts, rows, k]`` as the kernels read it."""

    words: Tensor  # int32, see the module's text
    scales: (
        Tensor  # int32 [experts, rows / 16, ceil(k / 64), 8], or ROW_SCALED [experts, rows / 16, ceil(k / 64) + 1, 16]
    )
    peaks: Tensor | None  # MXFP4: int32 [experts, rows / 16, 8]
    format: BlockFormat
    order: RowOrder
    k: int

    @property
    def layout(self) -> str:
        return layout_name(self.format)

    @property
    def num_experts(self) -> int:
        return self.words.shape[0]

    @property
    def rows(self) -> int:
        return self.words.shape[1] * TILE_ROWS

    @property
    def k_tiles(self) -> int:
        return self.words.shape[2]

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes + (0 if self.peaks is None else self.peaks.nbytes)


def layout_name(fmt: BlockFormat) -> str:
    return f"{fmt.name}_fragments_{TILE_ROWS}x{TILE_K}"


def packed_bytes(fmt: BlockFormat, experts: int, rows: int, k: int) -> int:
    """Bytes of ``experts`` matrices ``[rows, k]`` in the layout of ``fmt``."""
    row_tiles = rows // TILE_ROWS
    tile = TILE_ROWS * TILE_K * fmt.bits // 8 + (64 if fmt.name in ROW_SCALED else 32)
    of_rows = TILE_ROWS * (2 if fmt is MXFP4 else fmt.row_bytes)
    return experts * row_tiles * (-(-k // TILE_K) * tile + of_rows)


def _e2m1_moves() -> dict[int, int]:
    """Bit of a checkpoint word (eight nibbles, the even column low) → bit of a packed word."""
    moves = {}
    for f, (sign, magnitude, crossed) in enumerate(_FIELDS):
        for p in range(2):
            nibble = 4 * (2 * f + p)
            for bit, place in zip((2, 1, 0), magnitude, strict=True):
                moves[nibble + bit] = 16 * p + place
            moves[nibble + 3] = 16 * (1 - p if crossed else p) + sign
    return moves


def _e4m3_moves() -> dict[int, int]:
    """Bit of a checkpoint word (four bytes) → bit of a packed word."""
    return {8 * column + bit: 8 * byte + bit for column, byte in enumerate(_BYTES) for bit in range(8)}


_MOVES = {MXFP4: _e2m1_moves(), MXFP8: _e4m3_moves(), NVFP4: _e2m1_moves(), FP8_BLOCK: _e4m3_moves()}


def _signed(mask: int) -> int:
    return mask - (1 << 32) if mask >> 31 else mask


def _move_bits(words: Tensor, moves: Iterable[tuple[int, int]]) -> Tensor:
    """int32 words with bit ``source`` at ``target`` for each pair; bits that move equally far move together."""
    if not has_numbers(words):  # a shape: there is nothing to move, and torch would take a millisecond a step
        return words
    masks: dict[int, int] = {}
    for source, target in moves:
        masks[target - source] = masks.get(target - source, 0) | 1 << target
    out = torch.zeros_like(words)
    for distance, mask in masks.items():
        moved = words << distance if distance >= 0 else words >> -distance
        # The mask also clears what an arithmetic shift to the right drags in.
        out |= moved & _signed(mask)
    return out


def _split_rows(x: Tensor, order: RowOrder) -> Tensor:
    """``[E, rows, ...]`` as a view ``[E, R, 2 = h, 8 = g, ...]`` in packed order."""
    experts, rows, *rest = x.shape
    if order is RowOrder.PLAIN:
        return x.reshape(experts, rows // 16, 2, 8, *rest)
    if order is RowOrder.INTERLEAVED:
        return x.reshape(experts, rows // 16, 8, 2, *rest).transpose(2, 3)
    return x.reshape(experts, 2, rows // 16, 8, *rest).transpose(1, 2)


def _join_rows(x: Tensor, order: RowOrder) -> Tensor:
    """The inverse of ``_split_rows``."""
    if order is RowOrder.INTERLEAVED:
        x = x.transpose(2, 3)
    elif order is RowOrder.HALVES:
        x = x.transpose(1, 2)
    return x.flatten(1, 3)


def pack_rows(x: Tensor, order: RowOrder) -> Tensor:
    """``[experts, rows]``, a bias for one, in packed row order."""
    return _split_rows(x, order).flatten(1)


def _pad_groups(x: Tensor, groups: int) -> Tensor:
    """``[E, rows, groups, ...]`` with zeros up to ``groups``."""
    if x.shape[2] == groups:
        return x
    return torch.cat((x, x.new_zeros(*x.shape[:2], groups - x.shape[2], *x.shape[3:])), dim=2)


def _pack_words(values: Tensor, fmt: BlockFormat, order: RowOrder, k_tiles: int) -> Tensor:
    """Bytes ``[E, rows, k * bits / 8]`` → words."""
    words = values.contiguous().view(torch.int32).unflatten(2, (-1, fmt.bits))  # [E, rows, group, 4 t (x 2 j)]
    words = _move_bits(_pad_groups(words, 2 * k_tiles), _MOVES[fmt].items())
    words = _split_rows(words.unflatten(2, (k_tiles, 2)), order)  # [E, R, h, g, T, G, t (j)]
    if fmt.bits == 4:
        return words.permute(0, 1, 4, 3, 6, 5, 2).flatten(5, 6).flatten(3, 4)  # [E, R, T, (g t), (G h)]
    words = words.reshape(*words.shape[:-1], 4, 2)  # [E, R, h, g, T, G, t, j]
    return words.permute(0, 1, 4, 5, 3, 6, 7, 2).flatten(6, 7).flatten(4, 5)  # [E, R, T, G, (g t), (j h)]


def _unpack_words(words: Tensor, fmt: BlockFormat, order: RowOrder, groups: int) -> Tensor:
    """The inverse of ``_pack_words``."""
    if fmt.bits == 4:
        words = words.unflatten(3, (8, 4)).unflatten(5, (2, 2)).permute(0, 1, 6, 3, 2, 5, 4)  # [E, R, h, g, T, G, t]
    else:
        words = words.unflatten(4, (8, 4)).unflatten(6, (2, 2)).permute(0, 1, 7, 4, 2, 3, 5, 6).flatten(6, 7)
    words = _join_rows(words, order).flatten(2, 3)[:, :, :groups]
    words = _move_bits(words, ((target, source) for source, target in _MOVES[fmt].items()))
    return words.flatten(2).contiguous().view(torch.uint8)


def _pack_scales(scales: Tensor, order: RowOrder, k_tiles: int) -> Tensor:
    """Bytes ``[E, rows, groups]`` → int32 ``[E, R, T, 8]``."""
    padded = _split_rows(_pad_groups(scales, 2 * k_tiles).unflatten(2, (k_tiles, 2)), order)  # [E, R, h, g, T, G]
    return padded.permute(0, 1, 4, 3, 5, 2).contiguous().flatten(4).view(torch.int32).squeeze(-1)


def _unpack_scales(scales: Tensor, order: RowOrder, groups: int) -> Tensor:
    """The inverse of ``_pack_scales``."""
    split = scales.contiguous()[..., None].view(torch.uint8).unflatten(-1, (2, 2)).permute(0, 1, 5, 3, 2, 4)
    return _join_rows(split, order).flatten(2)[:, :, :groups].contiguous()


def _positive(part: BlockScaled) -> BlockScaled:
    """NVFP4 whose scales are all positive, or 0 over codes of 0."""
    flip = torch.where(part.scales >= 0x80, 0x88, 0).to(torch.uint8)
    keep = torch.where(part.scales & 0x7F == 0, 0, 0xFF).to(torch.uint8)
    codes = (part.values.unflatten(-1, (-1, NVFP4.block // 2)) ^ flip[..., None]) & keep[..., None]
    return BlockScaled(codes.flatten(-2), part.scales & 0x7F, part.format, part.row_scales)


def _pack_block_scales(part: BlockScaled, order: RowOrder, k_tiles: int) -> Tensor:
    """Positive NVFP4's scales → int32 ``[E, R, T + 1, 16]``."""
    scales, rows = part.scales, part.row_scales
    assert rows is not None
    bits = scales.view(torch.float8_e4m3fn).float().view(torch.int32)
    scales = torch.where(scales == 0, 0, (bits >> 20) - _E5M3_OFFSET).to(torch.uint8)
    padded = _pad_groups(scales.unflatten(2, (-1, 2)), 2 * k_tiles).unflatten(2, (k_tiles, 2))
    padded = _split_rows(padded, order).permute(0, 1, 4, 3, 6, 5, 2)  # [E, R, T, g, p, G, h]
    words = padded.contiguous().flatten(5).view(torch.int32).flatten(3)
    return torch.cat((words, _row_words(rows, order)), dim=2)


def _unpack_block_scales(words: Tensor, order: RowOrder, groups: int) -> tuple[Tensor, Tensor]:
    """The inverse of ``_pack_block_scales``: scale bytes ``[E, rows, 2 * groups]`` and float32 ``[E, rows]``."""
    split = words[:, :, :-1].contiguous()[..., None].view(torch.uint8).unflatten(3, (8, 2)).unflatten(5, (2, 2))
    split = split.permute(0, 1, 6, 3, 2, 5, 4)  # [E, R, h, g, T, G, p]
    scales = _join_rows(split, order).flatten(2, 3)[:, :, :groups].flatten(2)
    numbers = ((scales.int() + _E5M3_OFFSET) << 20).view(torch.float32).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(scales == 0, 0, numbers).to(torch.uint8), _unpack_rows(words, order)


def _pack_factors(scales: Tensor, order: RowOrder, k_tiles: int) -> Tensor:
    """float32 ``[E, rows, groups]`` → int32 ``[E, R, T + 1, 16]``."""
    largest = scales.abs().amax(2)
    alike = (scales == largest[..., None]).all(2)
    below = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    rows = torch.where(largest == 0, 1.0, torch.where(alike, largest, below)).clamp(min=2.0**-126)
    factors = (scales / rows[..., None] * FACTOR).bfloat16().view(torch.int16)
    padded = _split_rows(_pad_groups(factors, 2 * k_tiles).unflatten(2, (k_tiles, 2)), order)  # [E, R, h, g, T, G]
    words = padded.permute(0, 1, 4, 3, 5, 2).contiguous().flatten(4).view(torch.int32).flatten(3)
    return torch.cat((words, _row_words(rows, order)), dim=2)


def _unpack_factors(words: Tensor, order: RowOrder, groups: int) -> Tensor:
    """The inverse of ``_pack_factors``."""
    split = words[:, :, :-1].contiguous().view(torch.bfloat16).unflatten(3, (8, 2, 2)).permute(0, 1, 5, 3, 2, 4)
    factors = _join_rows(split, order).flatten(2)[:, :, :groups].float()
    return factors / FACTOR * _unpack_rows(words, order)[..., None]


def _row_words(rows: Tensor, order: RowOrder) -> Tensor:
    """float32 ``[E, rows]`` → int32 ``[E, R, 1, 16]``."""
    words: Tensor = pack_rows(rows, order).contiguous().view(torch.int32).unflatten(1, (-1, 1, TILE_ROWS))
    return words


def _unpack_rows(words: Tensor, order: RowOrder) -> Tensor:
    of_rows = words[:, :, -1].contiguous().view(torch.float32).unflatten(2, (2, 8))
    return _join_rows(of_rows, order).contiguous()


def _pack_peaks(scales: Tensor, order: RowOrder) -> Tensor:
    """Bytes ``[E, rows, groups]`` → int32 ``[E, R, 8]``."""
    half = PEAK_BIAS - _split_rows(scales.amax(2).int(), order)  # [E, R, h, g]
    return half[:, :, 0] | half[:, :, 1] << 16


def check_packable(tensor: BlockScaled) -> None:
    """Refuses a tensor ``[experts, rows, k]`` that the layout cannot hold, with the reason."""
    if len(tensor.shape) != 3:
        raise Unsupported(f"Expert weights have three axes; this tensor is {tensor.shape}.")
    if tensor.format not in _MOVES:
        raise Unsupported(f"There is no packed layout for {tensor.format.name} weights.")
    if tensor.shape[2] % BLOCK:
        raise Unsupported(f"Expert weights need a multiple of {BLOCK} columns, not {tensor.shape[2]}.")
    if tensor.shape[1] % TILE_ROWS:
        raise Unsupported(f"Expert weights need a multiple of {TILE_ROWS} rows, not {tensor.shape[1]}.")


def has_numbers(tensor: Tensor) -> bool:
    """Whether there is anything to check: tensors on ``meta`` have shapes and types alone."""
    return tensor.device.type != "meta" and tensor.numel() > 0


class Findings:
    """What no kernel would treat as a NaN, or cannot scale, found on the device and read by the host in one wait.

    A wait for each chunk or expert would leave the device idle between them, in a load some thousand times.
    """

    def __init__(self) -> None:
        self._tensors: list[list[Tensor]] = []
        self._flags: list[tuple[Tensor, str]] = []

    def begin(self) -> None:
        """What is added next is the first expert of another tensor."""
        self._tensors.append([])

    def add(self, part: BlockScaled) -> None:
        """Some experts: the largest scale byte of each, and whether it has a NaN among its values."""
        if not has_numbers(part.scales):
            return
        if part.format is FP8_BLOCK:  # a NaN, or an infinity, which is none
            largest = torch.where(part.scales.isfinite().flatten(1).all(1), 0, SCALE_NAN)
        else:
            largest = part.scales.flatten(1).amax(1).int()
        if part.format.has_row_scales:  # E4M3, of which none is too large
            largest = torch.where(((part.scales & 0x7F) == 0x7F).flatten(1).any(1), SCALE_NAN, 0)
            assert part.row_scales is not None
            self.add_nan(part.row_scales, f"An {part.format.name} weight has a NaN for its scale.")
        if part.format.bits == 8:
            nan = ((part.values & 0x7F) == 0x7F).flatten(1).any(1).int()
        else:
            nan = torch.zeros_like(largest)
        self._tensors[-1].append(torch.stack((largest, nan), dim=1))

    def add_nan(self, numbers: Tensor, message: str) -> None:
        """Numbers among which a NaN is refused with this message."""
        if has_numbers(numbers):
            self._flags.append((numbers.isnan().any().int(), message))

    def refuse(self) -> None:
        """Refuses what was found. Waits for the device once."""
        parts = [part for tensor in self._tensors for part in tensor]
        flags = [flag for flag, _ in self._flags]
        if not parts and not flags:
            return
        answers = iter(torch.cat([part.flatten() for part in parts] + [flag.view(1) for flag in flags]).tolist())
        for tensor in self._tensors:
            for expert in range(sum(len(part) for part in tensor)):
                _refuse(expert, largest=next(answers), nan=next(answers))
        for _, message in self._flags:
            if next(answers):
                raise BadCheckpoint(message)


def _refuse(expert: int, largest: int, nan: int) -> None:
    if largest == SCALE_NAN:
        raise BadCheckpoint(f"Expert {expert} has a NaN among its scales; the checkpoint is damaged.")
    if largest > MAX_SCALE:
        raise BadCheckpoint(
            f"Expert {expert} has a group scale of 2**{largest - 127}; the expert kernels read at most "
            f"2**{MAX_SCALE - 127}."
        )
    if nan:
        raise BadCheckpoint(f"Expert {expert} has a NaN among its values; the checkpoint is damaged.")


def pack(
    tensor: BlockScaled,
    order: RowOrder,
    device: torch.device | str | None = None,
    findings: Findings | None = None,
) -> Packed:
    """``[experts, rows, k]`` in the packed layout on ``device`` (by default where it is), some experts at a time.

    Temporary memory is a few times one expert or ``CHUNK_BYTES``, whatever the number of experts. What is wrong with
    the numbers goes to ``findings``, for the caller to refuse; without, it is refused here.
    """
    check_packable(tensor)
    device = torch.device(device) if device is not None else tensor.device
    found = Findings() if findings is None else findings
    found.begin()
    fmt = tensor.format
    experts, rows, k = tensor.shape
    k_tiles = -(-k // TILE_K)
    lanes = (LANES, 4) if fmt.bits == 4 else (2, LANES, 4)
    of_tiles = (k_tiles + 1, 16) if fmt.name in ROW_SCALED else (k_tiles, 8)
    words = torch.empty((experts, rows // TILE_ROWS, k_tiles, *lanes), dtype=torch.int32, device=device)
    scales = torch.empty((experts, rows // TILE_ROWS, *of_tiles), dtype=torch.int32, device=device)
    peaks = torch.empty((experts, rows // TILE_ROWS, 8), dtype=torch.int32, device=device) if fmt is MXFP4 else None
    if tensor.device.type == "meta":  # for the first difference of such tensors torch imports its compiler
        return Packed(words, scales, peaks, fmt, order, k)
    step = max(1, CHUNK_BYTES // max(1, tensor.values[:1].nbytes))
    for start in range(0, experts, step):
        part, place = tensor[start : start + step].to(device), slice(start, start + step)
        found.add(part)
        if fmt.has_row_scales:
            part = _positive(part)
            scales[place] = _pack_block_scales(part, order, k_tiles)
        elif fmt is FP8_BLOCK:
            scales[place] = _pack_factors(part.scales, order, k_tiles)
        else:
            scales[place] = _pack_scales(part.scales, order, k_tiles)
        words[place] = _pack_words(part.values, fmt, order, k_tiles)
        if peaks is not None:
            peaks[place] = _pack_peaks(part.scales, order)
    if findings is None:
        found.refuse()
    return Packed(words, scales, peaks, fmt, order, k)


def unpack(packed: Packed) -> BlockScaled:
    """The tensor that was packed, bit for bit; of NVFP4 the same numbers, under scales that are not negative; of FP8
    blocks under scales that are rounded as the layout says."""
    groups = packed.k // BLOCK
    values = _unpack_words(packed.words, packed.format, packed.order, groups)
    if packed.format.has_row_scales:
        scales, rows = _unpack_block_scales(packed.scales, packed.order, groups)
        return BlockScaled(values, scales, packed.format, rows)
    if packed.format is FP8_BLOCK:
        return BlockScaled(values, _unpack_factors(packed.scales, packed.order, groups), packed.format)
    return BlockScaled(values, _unpack_scales(packed.scales, packed.order, groups), packed.format)
