"""Dense kernels for small batches without a GPU: which tiles run where, and that a walk along K meets each column once.

The kernels are Gluon and do not run in Triton's interpreter; they run in ``tests/gpu``. The walk is executed here as
plain Python. The conversions of packed words are those of the experts' kernels, which ``test_moe_small_batch.py``
executes word for word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from microscale.hardware import KNOWN, Gpu, known
from microscale.hardware.tiles.dense import (
    COLUMNS,
    ONE_WAVE_ROWS_PER_SM,
    SECTION,
    DenseCase,
    DenseFormat,
    Size,
    choose,
    columns_for,
    possible,
    size_of,
    tile_of,
)
from microscale.hardware.tiles.gemm import LOGIT_TOKENS, GemmPath, dense_tile
from microscale.hardware.tiles.tuned import measured
from microscale.kernels.dense import gemm, small_batch, walk_jit
from microscale.kernels.dense.cost import activation_bytes, weight_bytes
from microscale.kernels.dense.fragments import TritonMxfp8
from microscale.kernels.dense.packed import pack
from microscale.kernels.dense.spec import FORMATS, DenseSpec
from microscale.kernels.launch import Launch, recording, taken_by
from microscale.kernels.op import Activations
from support.plain_gluon import Pointer, plain
from support.shapes import dense_shapes

TOKENS, ROW_TILES = 2, 3
QUANTISED = [fmt for fmt in FORMATS if fmt != "bf16"]
NONE, GROUP = (getattr(walk_jit, name).value for name in ("NONE", "GROUP"))


class Met:
    """Stands for ``_step``, and counts what each slice multiplies. Memory holds places along K, from 1 on; 0 is what a
    masked load gives."""

    def __init__(self, k: int, slices: int, bits: int) -> None:
        self.columns = np.zeros((slices, k + 1), np.int64)
        self.bits = bits

    def __call__(self, acc: Any, tile: Any, x: Any, *others: Any) -> Any:
        for group, tokens in enumerate(x):
            for s, columns in enumerate(tokens[:, 0].astype(np.int64)):
                np.add.at(self.columns[s], columns, 1)
                here = {int(column) - 1 for column in columns if column}
                assert (tokens[s] == columns).all(), "tokens are at the same columns"
                words = {int(word) - 1 for word in tile[group if self.bits == 16 else 0][s].flat if word}
                of_words = {column // (2 if self.bits == 16 else 64) for column in here}
                assert not here or words == of_words, "weights of other columns than the tokens'"
        return acc


@pytest.mark.parametrize("k", [32, 64, 96, 352, 704, 2112, 2880, 4096])
@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("ahead", [1, 2, 3, 4])
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("early", [False, True])
def test_every_column_is_met_once(k: int, slices: int, ahead: int, bits: int, early: bool) -> None:
    """``walk_along_k`` itself, as Python: which columns of weights and tokens meet, and that nothing else is read."""
    k_tiles, rows = -(-k // 64), 16 * ROW_TILES
    met = Met(k, slices, bits)
    walk = plain(walk_jit, "walk_along_k", {"_step": met})
    x = np.tile(np.arange(1, k + 1), TOKENS)
    if bits == 16:
        w = np.tile(np.arange(1, k // 2 + 1), rows)
    else:
        w = np.tile(np.repeat(np.arange(1, k_tiles + 1), 32 * bits), ROW_TILES)
    scales = np.zeros(ROW_TILES * k_tiles * 8, np.int64)
    # One row tile beyond the last, and one token.
    sizes = (1, 0, rows, TOKENS, k, k)
    scaled = NONE if bits == 16 else GROUP
    shape = (4, ROW_TILES, 1, slices, ahead)
    walk(Pointer(x), Pointer(w), Pointer(scales), *sizes, *shape, bits, scaled, early, True, None)
    assert (met.columns[:, 1:].sum(axis=0) == 1).all()


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("path", [GemmPath.W4A16, GemmPath.W8A16, GemmPath.W4A8, GemmPath.W8A8])
def test_the_tile_of_a_batch_is_what_is_started(gpu: Gpu, path: GemmPath) -> None:
    fmt = "mxfp4" if path.weight_bits == 4 else "mxfp8"
    packed = pack(dense_shapes(fmt, 128, 128))
    for rows in (128, 2880, 5120, 201088):
        for tokens in (17, 64, 200, 1024, 8192):
            for logits in (False, True):
                tile = dense_tile(path, gpu, tokens, rows, logits)
                x = torch.empty((tokens, 128), dtype=torch.bfloat16, device="meta")
                with recording() as found:
                    if logits:
                        gemm.run_logits(packed, gpu, x, block_scaled=path.block_scaled, tile=tile)
                    else:
                        gemm.run(packed, gpu, x, None, block_scaled=path.block_scaled, tile=tile)
                kernel = next(kernel for kernel in found if kernel.short_name.startswith("gemm"))
                assert kernel.short_name == ("gemm_logits" if logits else "gemm")
                sizes = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES")
                assert [kernel.constants[name] for name in sizes] == [
                    tile.block_m, tile.block_n, tile.block_k, tile.stages
                ]  # fmt: skip
                assert tile.block_m <= (LOGIT_TOKENS if logits else 128)


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_chosen_can_run(fmt: str, gpu: Gpu) -> None:
    for rows in (128, 2816, 5120, 8192, 12288, 201088, 262144):
        for tokens in (1, 8, 9, 16, 17, 40, 100):
            tile = choose(fmt, rows, tokens, gpu)
            blocks = -(-tokens // tile.columns) if tile.columns == 32 else 1
            assert tile in possible(fmt, tile.columns, gpu)
            assert tile.columns == columns_for(fmt, rows, tokens, gpu) <= (16 if fmt == "bf16" else 32)
            case = DenseCase(DenseFormat(fmt), tile.columns, size_of(blocks * rows, gpu))
            assert tile == tile_of(case, gpu)
            assert SECTION.misfit(case, tile, gpu.family) is None
            # At least one program has its registers, and room for the sums of its slices.
            assert 32 * tile.warps * tile.registers <= gpu.registers_per_sm
            assert 4 * tile.slices * tile.rows * tile.columns <= gpu.shared_per_block


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_wave_is_one(fmt: str) -> None:
    """Where registers were measured for one wave of programs, the card has room for all of them at once."""
    gpu = known("h200")
    rows = ONE_WAVE_ROWS_PER_SM * gpu.num_sms
    case = DenseCase(DenseFormat(fmt), COLUMNS[0], Size.ONE_WAVE)
    assert size_of(rows, gpu) is Size.ONE_WAVE
    if case not in measured(SECTION, gpu.family):
        pytest.skip("nobody measured it")
    tile = tile_of(case, gpu)
    assert rows / tile.rows <= gpu.num_sms * (gpu.registers_per_sm // (32 * tile.warps * tile.registers))


@pytest.mark.parametrize(
    ("tokens", "rows", "taken"),
    [
        (16, 201088, True), (17, 201088, False), (64, 5120, True), (65, 5120, False), (33, 8192, False),
        (64, 2880, True), (65, 16, False),
    ],
)  # fmt: skip
def test_more_tokens_while_few_programs_read_them(tokens: int, rows: int, taken: bool) -> None:
    """Five an SM of 32 tokens and one row tile: 660, and 5120 rows are 320 of them for each 32 tokens."""
    assert small_batch.takes(tokens, rows, known("h200")) is taken


@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "row_tiles", "programs"),
    [(32, 2880, 16, 1, 360), (33, 2880, 32, 1, 360), (17, 5120, 32, 1, 320), (64, 5120, 32, 4, 160)],
)
def test_blocks_of_16_tokens_while_they_are_one_wave(
    fmt: str, tokens: int, rows: int, columns: int, row_tiles: int, programs: int
) -> None:
    gpu = known("h200")
    tile = choose(fmt, rows, tokens, gpu)
    assert (tile.columns, tile.row_tiles) == (columns, row_tiles)
    packed = pack(dense_shapes(fmt, rows, 128))
    started: list[Launch] = []

    def take(launch: Launch) -> bool:
        started.append(launch)
        return False

    with taken_by(take):
        small_batch.run(packed, gpu, torch.empty((tokens, 128), dtype=torch.bfloat16, device="meta"), None)
    (launch,) = started
    assert launch.grid[0] * launch.grid[1] == programs >= gpu.num_sms
    assert launch.spills_because is None


def test_weights_are_read_once_for_each_block_of_tokens() -> None:
    """What a small batch costs: two blocks of 16 are one wave, and more tokens are blocks of 32."""
    gpu = known("h200")

    def read(tokens: int) -> float:
        spec = DenseSpec(2880, 4096, "mxfp8", Activations.BF16, False, tokens)
        return (TritonMxfp8().cost(spec, gpu).bytes - activation_bytes(spec)) / weight_bytes(spec)

    assert [read(tokens) for tokens in (8, 9, 16, 17, 32, 33, 64)] == [1, 1, 1, 2, 2, 2, 2]
