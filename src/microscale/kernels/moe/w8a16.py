"""``triton_w8a16``: MXFP8 experts times bf16 activations on any GPU from SM80 on. See ``w4a16``."""

from __future__ import annotations

from microscale.formats import MXFP8
from microscale.hardware.tiles.gemm import GemmPath
from microscale.kernels import layouts
from microscale.kernels.moe import with_mlp
from microscale.kernels.moe.w4a16 import TritonW4A16


class TritonW8A16(TritonW4A16):
    """MXFP8 weights become bf16 in registers; sums in float32."""

    name = "triton_w8a16"
    layout = layouts.layout_name(MXFP8)
    format = MXFP8
    path = GemmPath.W8A16
    mlp_paths = (with_mlp.PATH,)
