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
from microscale.hardware.tiles.dense import choose, possible
from microscale.hardware.tiles.gemm import LOGIT_TOKENS, GemmPath, dense_tile
from microscale.kernels.dense import gemm, small_batch, small_batch_jit
from microscale.kernels.dense.packed import pack
from microscale.kernels.dense.spec import FORMATS
from microscale.kernels.launch import recording
from support.plain_gluon import Pointer, plain
from support.shapes import dense_shapes

TOKENS, ROW_TILES = 2, 3
NONE, GROUP = (getattr(small_batch_jit, name).value for name in ("NONE", "GROUP"))


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
def test_every_column_is_met_once(k: int, slices: int, ahead: int, bits: int) -> None:
    """``_walk`` itself, as Python: which columns of weights and tokens meet, and that nothing else is read."""
    k_tiles, rows = -(-k // 64), 16 * ROW_TILES
    met = Met(k, slices, bits)
    walk = plain(small_batch_jit, "_walk", {"_step": met})
    x = np.tile(np.arange(1, k + 1), TOKENS)
    if bits == 16:
        w = np.tile(np.arange(1, k // 2 + 1), rows)
    else:
        w = np.tile(np.repeat(np.arange(1, k_tiles + 1), 32 * bits), ROW_TILES)
    scales = np.zeros(ROW_TILES * k_tiles * 8, np.int64)
    # One row tile beyond the last, and one token.
    sizes = (1, 0, rows, TOKENS, k, k)
    scaled = NONE if bits == 16 else GROUP
    walk(Pointer(x), Pointer(w), Pointer(scales), *sizes, 4, ROW_TILES, 1, slices, ahead, bits, scaled, True, None)
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


def test_few_rows_are_shared_along_k() -> None:
    gpu = known("h200")
    assert choose("bf16", 5120, 1, gpu).slices == 4
    assert choose("bf16", 201088, 1, gpu).slices == 1
    assert choose("bf16", 5120, 8, gpu).columns == 8
    assert choose("bf16", 5120, 9, gpu).columns == choose("bf16", 5120, 40, gpu).columns == 16
    # 5120 rows fill a card of 16 SMs.
    assert choose("bf16", 5120, 1, known("gb10")).slices == 4
    assert choose("bf16", 12288, 1, known("gb10")).slices == 1


def test_one_wave_where_registers_allow() -> None:
    gpu = known("h200")
    assert choose("mxfp8", 5120, 1, gpu).registers == 168  # 320 programs, three an SM: 396
    assert choose("mxfp8", 8192, 1, gpu).registers == 128  # 512 of 528
    assert choose("mxfp8", 8192, 1, known("rtx5090")).registers == 255


@pytest.mark.parametrize(
    ("tokens", "rows", "taken"),
    [(16, 201088, True), (17, 201088, False), (32, 5120, True), (33, 5120, False), (64, 2880, True), (65, 16, False)],
)
def test_more_tokens_while_their_programs_are_two_waves(tokens: int, rows: int, taken: bool) -> None:
    assert small_batch.takes(tokens, rows, known("h200")) is taken


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_chosen_is_possible(fmt: str) -> None:
    for gpu in (known("h200"), known("rtx5090"), known("a100")):
        for rows in (128, 2816, 5120, 8192, 201088, 262144):
            for tokens in (1, 8, 9, 16, 100):
                tiles = choose(fmt, rows, tokens, gpu)
                assert tiles in possible(fmt, tiles.columns, gpu)
                eight = fmt == "mxfp8" and gpu == known("h200") and rows <= 32 * 132 and tokens <= 8
                assert tiles.warps == (8 if eight else 4)
