"""Launches of the grouped expert layer: the path for batches, on any GPU. ``grouped_jit`` has the arithmetic.

    dispatch → [quantise] → gate_up → [quantise] → down → combine

``bf16`` activations need no pass of their own. MXFP8 ones are made once per token before the first GEMM and in its
epilogue for the second. NVFP4 ones have a scale of the whole row, so that those of the second GEMM need a pass too. No
launch waits for the host, no sum depends on the order of execution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from microscale.errors import Unsupported
from microscale.formats import NVFP4
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.gemm import GemmPath, GemmTile, choose
from microscale.kernels import binding, mxfp8_jit, nvfp4_jit
from microscale.kernels.gate import gate_constants
from microscale.kernels.launch import launch, or_unread
from microscale.kernels.layouts import ROW_SCALED, Packed
from microscale.kernels.moe import grouped_jit as jit
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.routing import Dispatch, dispatch
from microscale.kernels.moe.small_batch import combine
from microscale.kernels.moe.spec import Gate, Routing
from microscale.kernels.numbers import cdiv, next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

# One program of quantise_tokens: 16 values a thread with 4 warps.
QUANTISE = {"ROWS": 4, "COLUMNS": 512}
QUANTISED_NUMBERS = 2048
"""Of one program of quantise_rows, which has whole rows: 16 values a thread with 4 warps, or more."""
SCALED_COLUMNS = 128
"""Quantised rows are padded to this many columns: one word of scale bytes."""
MMA = {
    Feature.MX_MMA: r"mma\.sync\S*block_scale",
    Feature.TCGEN05: r"tcgen05\.mma\S*block_scale",
}
# Triton 3.8 and 3.9 read scales of another type as E8M0, one for 32 columns, without a word.
NVFP4_MMA = {
    Feature.MX_MMA: r"mma\.sync\S*mxf4nvf4\S*4X\S*ue4m3",
    Feature.TCGEN05: r"tcgen05\.mma\S*mxf4nvf4\S*4X",
}


@dataclass(frozen=True)
class Activation:
    """Rows on their way into a GEMM: bf16, or codes in the GEMM's order with their scales (MXFP8, NVFP4)."""

    values: Tensor
    scales: Tensor | None

    @classmethod
    def empty(cls, rows: int, columns: int, block_scaled: bool, device: torch.device) -> Activation:
        if not block_scaled:
            return cls(torch.empty((rows, columns), dtype=torch.bfloat16, device=device), None)
        padded = cdiv(columns, SCALED_COLUMNS) * SCALED_COLUMNS
        values = torch.empty((rows, padded), dtype=torch.uint8, device=device)
        return cls(values, torch.empty((rows, padded // 32), dtype=torch.uint8, device=device))

    @property
    def scale_words(self) -> Tensor:
        """What the GEMM reads: words of the scales of 128 columns, four bytes or (NVFP4, words already) eight."""
        scales = self.values if self.scales is None else self.scales
        return scales.view(torch.int32) if scales.dtype == torch.uint8 else scales

    @property
    def scale_bytes(self) -> Tensor:
        return self.values if self.scales is None else self.scales


@dataclass(frozen=True)
class GemmSettings:
    """What both GEMMs of a layer share: their constants, options and promise."""

    constants: dict[str, Any]
    options: dict[str, Any]
    promise: str | None

    def grid(self, weights: Packed, work: Dispatch) -> tuple[int]:
        return (work.tiles.shape[0] * cdiv(weights.rows, self.constants["BLOCK_N"]),)


def mma_promise(gpu: Gpu, path: GemmPath) -> str | None:
    """The block-scaled instruction that the path is chosen for, where the card has one."""
    if not path.block_scaled:
        return None
    instructions = NVFP4_MMA if path is GemmPath.W4A4 else MMA
    return next((text for feature, text in instructions.items() if gpu.has(feature)), None)


def gemm_path(bits: int, block_scaled: bool, nvfp4: bool) -> GemmPath:
    """The kind of GEMM by the bits of a weight, and whether it is NVFP4."""
    if block_scaled and nvfp4:
        return GemmPath.W4A4
    return GemmPath(f"w{bits}a{8 if block_scaled else 16}")


def run(
    packed: PackedExperts,
    gate: Gate,
    x: Tensor,
    routing: Routing,
    gpu: Gpu,
    *,
    block_scaled: bool = False,
    tile: GemmTile | None = None,
) -> Tensor:
    """``x [tokens, hidden]`` bf16 → ``[tokens, hidden]`` bf16. ``block_scaled``: activations in MXFP8 inside, in
    NVFP4 where weights are."""
    tokens, top_k = routing.expert_ids.shape
    y = torch.empty((tokens, packed.hidden), dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return y
    if x.dtype != torch.bfloat16 or x.stride(1) != 1:
        raise Unsupported(f"The grouped expert kernels read rows of bfloat16, not {x.dtype} with strides {x.stride()}.")
    path = gemm_path(packed.gate_up.format.bits, block_scaled, packed.gate_up.format is NVFP4)
    tile = tile or choose(path, gpu, tokens * top_k, packed.num_experts, packed.hidden)
    work = dispatch(routing.expert_ids, packed.num_experts, tile.block_m)
    inputs = quantise(x, path) if block_scaled else Activation(x, None)
    in_epilogue = block_scaled and path is not GemmPath.W4A4
    h = Activation.empty(tokens * top_k, packed.intermediate, in_epilogue, x.device)
    constants = {"ROW_SCALES": packed.gate_up.format.name in ROW_SCALED, **gemm_constants(gpu, path, tile)}
    settings = GemmSettings(constants, gemm_options(gpu, path, tile), mma_promise(gpu, path))
    _gate_up(packed, gate, inputs, work, h, settings)
    if path is GemmPath.W4A4:
        h = _quantise_rows(h.values)
    parts = torch.empty((tokens * top_k, packed.hidden), dtype=torch.bfloat16, device=x.device)
    _down(packed, h, work, routing, parts, settings)
    combine(parts, y, top_k, gpu)
    return y


def quantise(x: Tensor, path: GemmPath) -> Activation:
    """Tokens as a block-scaled GEMM reads them."""
    if path is GemmPath.W4A4:
        return _quantise_rows(x)
    tokens, k = x.shape
    out = Activation.empty(tokens, k, True, x.device)
    stride = out.values.stride(0)
    grid = (cdiv(tokens, QUANTISE["ROWS"]), cdiv(stride, QUANTISE["COLUMNS"]))
    arguments = (x, out.values, out.scale_bytes, tokens, k, x.stride(0), stride)
    launch(mxfp8_jit.quantise_tokens, grid, arguments, {"PLAIN": binding.PLAIN, **QUANTISE}, {"num_warps": 4})
    return out


def _quantise_rows(x: Tensor) -> Activation:
    """Rows in NVFP4."""
    rows, k = x.shape
    words = cdiv(k, SCALED_COLUMNS)
    values = torch.empty((rows, words * SCALED_COLUMNS // 2), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, words + 1), dtype=torch.int64, device=x.device)
    columns = next_power_of_2(words * SCALED_COLUMNS)
    together = max(QUANTISED_NUMBERS // columns, 1)
    constants = {"PLAIN": binding.PLAIN, "ROWS": together, "COLUMNS": columns}
    arguments = (x, values, scales, rows, k, x.stride(0))
    options = {"num_warps": min(max(columns // QUANTISED_NUMBERS, 4), 16)}
    launch(nvfp4_jit.quantise_rows, (cdiv(rows, together),), arguments, constants, options)
    return Activation(values, scales)


def _gate_up(
    packed: PackedExperts, gate: Gate, x: Activation, work: Dispatch, h: Activation, settings: GemmSettings
) -> None:
    weights = packed.gate_up
    arguments = (
        x.values, x.scale_words, weights.words, weights.scales, or_unread(packed.gate_up_bias, x.values),
        h.values, h.scale_bytes, work.tiles, work.offsets, work.order,
        weights.rows, weights.k, x.values.stride(0), h.values.stride(0),
    )  # fmt: skip
    own = {"TOP_K": work.top_k, "HAS_BIAS": packed.gate_up_bias is not None, **gate_constants(gate)}
    constants = {**own, **settings.constants}
    launch(jit.gate_up, settings.grid(weights, work), arguments, constants, settings.options, settings.promise)


def _down(
    packed: PackedExperts,
    h: Activation,
    work: Dispatch,
    routing: Routing,
    parts: Tensor,
    settings: GemmSettings,
) -> None:
    weights = packed.down
    arguments = (
        h.values, h.scale_words, weights.words, weights.scales, or_unread(packed.down_bias, h.values),
        parts, routing.weights, work.tiles, work.offsets, work.order, weights.rows, weights.k, h.values.stride(0),
    )  # fmt: skip
    constants = {"HAS_BIAS": packed.down_bias is not None, **settings.constants}
    launch(jit.down, settings.grid(weights, work), arguments, constants, settings.options, settings.promise)


def gemm_constants(gpu: Gpu, path: GemmPath, tile: GemmTile) -> dict[str, Any]:
    return {
        "BITS": path.weight_bits,
        "MX": path.block_scaled,
        "PLAIN": binding.PLAIN,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "PART_M": tile.part_m(gpu.family),
        "QUADS": not (gpu.has(Feature.WGMMA) or gpu.has(Feature.TCGEN05)),
        "STAGES": tile.stages,
    }


def gemm_options(gpu: Gpu, path: GemmPath, tile: GemmTile) -> dict[str, Any]:
    # Left alone, ptxas aims at one more program an SM and spills: 36 bytes at 168 registers (w8a8, 64 x 128, SM120).
    options: dict[str, Any] = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": 255}
    if path.block_scaled and gpu.family.triton_arch is not None:
        options["arch"] = gpu.family.triton_arch
    return options
