"""Large batches of 8-bit and 4-bit weights: one layer's weights become bf16, then cuBLAS.

From some hundred tokens on, writing and reading a bf16 copy of the weights costs less than what a GEMM that decodes on
the way loses against cuBLAS. The copy lasts for the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.hardware.tiles.thresholds import ThresholdName, threshold
from microscale.kernels import binding
from microscale.kernels.dense import unpack_jit
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.launch import launch
from microscale.kernels.layouts import ROW_SCALED, TILE_K, TILE_ROWS
from microscale.kernels.linear import linear
from microscale.kernels.numbers import cdiv

if TYPE_CHECKING:
    from torch import Tensor

TILES = 4
WARPS = 4


def pays(tokens: int, gpu: Gpu) -> bool:
    """Whether the copy costs less than what the GEMM loses."""
    return tokens >= threshold(ThresholdName.UNPACK_TOKENS, gpu)


def unpack(packed: PackedDense) -> Tensor:
    """bf16 ``[rows, k]``: exact, except where rows have scales, which are no powers of two (FP8, NVFP4)."""
    out = torch.empty((packed.rows, packed.k), dtype=torch.bfloat16, device=packed.weight.device)
    k_tiles = -(-packed.k // TILE_K)
    grid = (packed.rows // TILE_ROWS, cdiv(k_tiles, TILES))
    scales = packed.channels if packed.groups is None else packed.groups
    row_scales = packed.format in ROW_SCALED
    groups = packed.groups is not None and not row_scales
    constants = {
        "BITS": packed.bits, "GROUPS": groups, "ROW_SCALES": row_scales, "TILES": TILES, "PLAIN": binding.PLAIN
    }  # fmt: skip
    arguments = (packed.weight, scales, out, packed.k, k_tiles)
    launch(unpack_jit.unpack, grid, arguments, constants, {"num_warps": WARPS})
    return out


def run(packed: PackedDense, x: Tensor, residual: Tensor | None) -> Tensor:
    """``x [tokens, k]`` bf16 → bf16 ``[tokens, rows]``."""
    y = linear(x, unpack(packed), packed.bias)
    return y if residual is None else y + residual
