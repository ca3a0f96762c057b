"""Large batches of 8-bit and 4-bit weights: one layer's weights become bf16, then cuBLAS.

From some hundred tokens on, writing and reading a bf16 copy of the weights costs less than what a GEMM that decodes on
the way loses against cuBLAS. The copy lasts for the call.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from microscale.kernels.dense import unpack_jit
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.layouts import TILE_K, TILE_ROWS
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Variant

MIN_TOKENS = 256
"""For a 5120 x 2880 layer on an H200: 9 µs for the copy and 9 for the product, against 19 µs at 40 % of the peak."""
TILES = 4
WARPS = 4


def unpack(packed: PackedDense) -> Tensor:
    """bf16 ``[rows, k]``: exact, but for FP8's channels, whose scales are no powers of two."""
    out = torch.empty((packed.rows, packed.k), dtype=torch.bfloat16, device=packed.weight.device)
    k_tiles = -(-packed.k // TILE_K)
    grid = (packed.rows // TILE_ROWS, cdiv(k_tiles, TILES))
    unpack_jit.unpack[grid](
        packed.weight, packed.channels if packed.groups is None else packed.groups, out, packed.k, k_tiles,
        BITS=packed.bits, GROUPS=packed.groups is not None, TILES=TILES, PLAIN=triton.knobs.runtime.interpret,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def run(packed: PackedDense, x: Tensor, residual: Tensor | None) -> Tensor:
    """``x [tokens, k]`` bf16 → bf16 ``[tokens, rows]``."""
    y = F.linear(x, unpack(packed), packed.bias)
    return y if residual is None else y + residual


def variants(implementation: str, weight_format: str) -> Iterator[Variant]:
    bits = 4 if weight_format == "mxfp4" else 8
    yield Variant(
        op="dense",
        implementation=implementation,
        name=f"unpack {weight_format}",
        fn=unpack_jit.unpack,
        signature={
            "words_ptr": "*i32",
            "scales_ptr": "*fp32" if weight_format == "fp8" else "*i32",
            "out_ptr": "*bf16",
            "k": "i32",
            "k_tiles": "i32",
        },
        constants={"BITS": bits, "GROUPS": weight_format != "fp8", "TILES": TILES, "PLAIN": False},
        options={"num_warps": WARPS},
        divisible=("words_ptr", "scales_ptr", "out_ptr", "k"),
    )
