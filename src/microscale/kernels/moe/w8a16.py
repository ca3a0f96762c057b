"""``triton_w8a16``: MXFP8 experts times bf16 activations on any GPU from SM80 on. See ``w4a16``."""

from __future__ import annotations

from torch import Tensor

from microscale.formats import MXFP8
from microscale.hardware import Gpu
from microscale.hardware.tiles.gemm import GemmPath
from microscale.kernels import layouts
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.moe import with_mlp
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.spec import MoeSpec, Routing
from microscale.kernels.moe.w4a16 import TritonW4A16


class TritonW8A16(TritonW4A16):
    """MXFP8 weights become bf16 in registers; sums in float32."""

    name = "triton_w8a16"
    layout = layouts.layout_name(MXFP8)
    format = MXFP8
    path = GemmPath.W8A16

    def run_with_mlp(
        self,
        packed: PackedExperts,
        mlp: tuple[PackedDense, PackedDense],
        spec: MoeSpec,
        gpu: Gpu,
        x: Tensor,
        routing: Routing,
    ) -> Tensor | None:
        """A dense MLP of the experts' gate with them: ``x [2, tokens, hidden]``, for the MLP and for the experts →
        both answers, or ``None`` where they run apart. Its ``gate_up`` has runs of ``with_mlp.RUN`` rows."""
        if not with_mlp.serves(packed, mlp, routing, gpu):
            return None
        return with_mlp.run(packed, mlp, spec.gate, x, routing, gpu)
