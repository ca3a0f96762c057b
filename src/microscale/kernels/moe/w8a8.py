"""``triton_w8a8``: MXFP8 experts times MXFP8 activations on block-scaled matrix instructions. See ``w4a8``."""

from __future__ import annotations

from microscale.formats import MXFP8
from microscale.hardware.tiles.gemm import GemmPath
from microscale.kernels import layouts
from microscale.kernels.moe.w4a8 import BlockScaledMoe
from microscale.kernels.moe.w8a16 import TritonW8A16


class TritonW8A8(BlockScaledMoe):
    name = "triton_w8a8"
    layout = layouts.layout_name(MXFP8)
    format = MXFP8
    path = GemmPath.W8A8
    small_batch = TritonW8A16()
