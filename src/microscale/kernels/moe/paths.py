"""The paths of the Triton expert layers: for which batches each is meant, and what it starts.

All read one packed layout. ``supports`` states a path's own limits and from where on it was measured to pay; which of
two goes first follows from their order in ``BF16_PATHS``, ``MXFP8_PATHS`` and ``NVFP4_PATHS``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from microscale.formats import MXFP4, MXFP8, NVFP4, block_format
from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.gemm import GemmPath, choose
from microscale.hardware.tiles.thresholds import ThresholdName, crowd, threshold
from microscale.hardware.triton_faults import USED_BY
from microscale.kernels.layouts import TILE_K
from microscale.kernels.moe import grouped, grouped_wgmma, small_batch
from microscale.kernels.moe.grouped_wgmma import MIN_K_TILES, gemm_path
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.small_batch import DIRECT_TOKENS, LIST_PAIRS, MAX_TOKENS, OWN_LIST_TOKENS, OWN_LIST_TOP_K
from microscale.kernels.moe.spec import MoePath, MoeSpec, PartsPath, Routing
from microscale.kernels.numbers import cdiv
from microscale.kernels.op import Reason, always

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARE = 1 << 14
"""Pairs an expert beyond which no tile changes."""

Supports = Callable[[MoeSpec, Gpu], Reason | None]


def block_scaled(gpu: Gpu) -> bool:
    """Whether the card has a matrix instruction that applies the scales of blocks."""
    return gpu.has(Feature.MX_MMA) or gpu.has(Feature.TCGEN05)


def pays_narrow(spec: MoeSpec, gpu: Gpu) -> bool:
    """Whether there are enough tokens that arithmetic counts, and narrow activations with it."""
    many = block_scaled(gpu) or spec.tokens * spec.top_k > threshold(ThresholdName.FP8_PAIRS, gpu) * spec.num_experts
    return spec.tokens > MAX_TOKENS and many


def _up_to(most: int) -> Supports:
    def supports(spec: MoeSpec, gpu: Gpu) -> Reason | None:
        return None if spec.tokens <= most else f"runs up to {most} tokens, not {spec.tokens}"

    return supports


def _own_list(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    if spec.top_k > OWN_LIST_TOP_K:
        return f"finds up to {OWN_LIST_TOP_K} experts of a token, not {spec.top_k}"
    return _up_to(OWN_LIST_TOKENS)(spec, gpu)


def _wgmma(spec: MoeSpec, gpu: Gpu, weight_formats: tuple[str, ...]) -> Reason | None:
    """What wgmma needs, in bf16 and in FP8."""
    if not gpu.has(Feature.WGMMA):
        return f"needs wgmma, which {gpu.name} does not have"
    if spec.weight_format not in weight_formats:
        return f"converts {' and '.join(weight_formats)} weights, not {spec.weight_format}"
    narrow, least = min(spec.hidden, spec.intermediate), TILE_K * (MIN_K_TILES - 1)
    return None if narrow > least else f"needs more than {least} columns, not {narrow}"


def _wgmma_bf16(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    share = spec.tokens * spec.top_k / spec.num_experts
    least = crowd(gpu)
    crowded = least is not None and spec.tokens >= least.tokens and share >= least.pairs
    if (reason := _wgmma(spec, gpu, (MXFP4.name, NVFP4.name))) or spec.tokens > MAX_TOKENS or crowded:
        return reason
    if least is None:
        return f"pays from {MAX_TOKENS + 1} tokens on, not for {spec.tokens}"
    fewer = f"{least.tokens} with {least.pairs} pairs an expert"
    return f"pays from {MAX_TOKENS + 1} tokens on, or from {fewer}; {spec.tokens} make {share:.3g} pairs"


def _wgmma_list(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    if reason := _wgmma_bf16(spec, gpu):
        return reason
    pairs = spec.tokens * spec.top_k
    return None if pairs <= LIST_PAIRS else f"sorts up to {LIST_PAIRS} pairs, not {pairs}"


def _wgmma_fp8(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    if (reason := _wgmma(spec, gpu, (MXFP4.name,))) or pays_narrow(spec, gpu):
        return reason
    share = spec.tokens * spec.top_k / spec.num_experts
    least = threshold(ThresholdName.FP8_PAIRS, gpu)
    return f"pays beyond {MAX_TOKENS} tokens and {least} pairs an expert; {spec.tokens} make {share:.3g}"


def _block_scaled(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    if not block_scaled(gpu):
        return f"needs a block-scaled matrix instruction, which {gpu.name} does not have"
    return None if pays_narrow(spec, gpu) else f"pays beyond {MAX_TOKENS} tokens; here are {spec.tokens}"


def _resident(fp8: bool) -> Supports:
    def supports(spec: MoeSpec, gpu: Gpu) -> Reason | None:
        if reason := (_wgmma_fp8 if fp8 else _wgmma_bf16)(spec, gpu):
            return reason
        share, least = cdiv(spec.tokens * spec.top_k, spec.num_experts), resident_share(spec, gpu, fp8)
        if least is None:
            return f"has no tile for {gpu.name}"
        return None if share >= least else f"is meant for {least} pairs an expert and more, not {share}"

    return supports


def _resident_mxfp8(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    if reason := _wgmma(spec, gpu, (MXFP8.name,)):
        return reason
    share, least = spec.tokens * spec.top_k / spec.num_experts, threshold(ThresholdName.MXFP8_RESIDENT_PAIRS, gpu)
    if spec.tokens > MAX_TOKENS and share >= least:
        return None
    return f"is meant for more than {MAX_TOKENS} tokens and {least} pairs an expert; {spec.tokens} make {share:.3g}"


def _sum_in_norm(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    """The list's own limits. A path that goes before it adds up a token's experts by itself."""
    if spec.tokens <= DIRECT_TOKENS:
        return f"pays from {DIRECT_TOKENS + 1} tokens on, not for {spec.tokens}: fewer are added up in the last GEMM"
    if spec.tokens > (most := min(MAX_TOKENS, threshold(ThresholdName.SUM_IN_NORM_TOKENS, gpu))):
        return f"pays up to {most} tokens, not for {spec.tokens}"
    return None if _wgmma_bf16(spec, gpu) else "leaves crowded experts to wgmma, whose parts are in bf16"


def _own_list_parts(spec: MoeSpec, gpu: Gpu) -> Reason | None:
    return _sum_in_norm(spec, gpu) or _own_list(spec, gpu)


def resident_share(spec: MoeSpec, gpu: Gpu, fp8: bool) -> int | None:
    """Pairs an expert from which the chosen tile is a resident one."""
    bits = block_format(spec.weight_format).bits
    return _resident_share(gpu, spec.num_experts, spec.hidden, gemm_path(bits, fp8))


@lru_cache(maxsize=256)
def _resident_share(gpu: Gpu, num_experts: int, hidden: int, path: GemmPath) -> int | None:
    def resident(share: int) -> bool:
        return choose(path, gpu, share * num_experts, num_experts, hidden).resident(path)

    share = bisect_left(range(MAX_SHARE), True, lo=1, key=resident)
    return share if share < MAX_SHARE else None


def _grouped(
    packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing, *, block_scaled: bool = False
) -> Tensor:
    return grouped.run(packed, spec.gate, x, routing, gpu, block_scaled=block_scaled)


def _grouped_block_scaled(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    return _grouped(packed, spec, gpu, x, routing, block_scaled=True)


def _on_wgmma(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    return grouped_wgmma.run(packed, spec.gate, x, routing, gpu)


def _on_wgmma_list(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    return grouped_wgmma.run(packed, spec.gate, x, routing, gpu, short_list=True)


def _on_wgmma_fp8(packed: PackedExperts, spec: MoeSpec, gpu: Gpu, x: Tensor, routing: Routing) -> Tensor:
    return grouped_wgmma.run(packed, spec.gate, x, routing, gpu, fp8=True)


RESIDENT = "its programs stay on their SM and load weights while others multiply"
READS_ONCE = "it reads the weights at the memory's speed"
NO_LIST = "each program finds its tile, and no list is made"

DIRECT = MoePath(
    "small batch, direct", "each token reads its own experts, and no list is made", _up_to(DIRECT_TOKENS),
    small_batch.run_direct,
)  # fmt: skip
LIST = MoePath("small batch, list", READS_ONCE, _up_to(MAX_TOKENS), small_batch.run_list)
OWN_LIST = MoePath(
    "small batch, own list", NO_LIST, _own_list, small_batch.run_own_list, timed_as=LIST.name,
)  # fmt: skip
OWN_LIST_PARTS = PartsPath("small batch, own list", NO_LIST, _own_list_parts, small_batch.run_own_list_parts)
LIST_PARTS = PartsPath("small batch, list", "it is the last", _sum_in_norm, small_batch.run_list_parts)
WGMMA_RESIDENT = MoePath("wgmma, resident", RESIDENT, _resident(fp8=False), _on_wgmma)
MXFP8_RESIDENT = MoePath("wgmma MXFP8, resident", RESIDENT, _resident_mxfp8, _on_wgmma)
WGMMA_LIST = MoePath("wgmma, list", "sorting so few pairs is one launch", _wgmma_list, _on_wgmma_list)
WGMMA = MoePath("wgmma", "it reads tokens from shared memory, not from registers", _wgmma_bf16, _on_wgmma)
GROUPED = MoePath("grouped", "it is the last", always, _grouped, uses=USED_BY["grouped experts"])
FP8_RESIDENT = MoePath("wgmma FP8, resident", RESIDENT, _resident(fp8=True), _on_wgmma_fp8)
WGMMA_FP8 = MoePath("wgmma FP8", "FP8 units are twice as fast as bf16 ones", _wgmma_fp8, _on_wgmma_fp8)
BLOCK_SCALED = MoePath(
    "grouped, block-scaled", "the matrix instruction applies the scales", _block_scaled, _grouped_block_scaled,
    uses=USED_BY["grouped experts, block-scaled"],
)  # fmt: skip

BLOCK_SCALED_NVFP4 = replace(BLOCK_SCALED, name="grouped, block-scaled NVFP4", uses=USED_BY["grouped experts, NVFP4"])

BF16_PATHS = (DIRECT, WGMMA_RESIDENT, MXFP8_RESIDENT, WGMMA_LIST, WGMMA, OWN_LIST, LIST, GROUPED)
"""With bf16 activations."""


def _with_bf16(path: MoePath[PackedExperts]) -> MoePath[PackedExperts]:
    """One of ``BF16_PATHS`` among those of narrow activations."""
    timed_as = None if path.timed_as is None else f"{path.timed_as}, bf16"
    return replace(path, name=f"{path.name}, bf16", timed_as=timed_as)


MXFP8_PATHS = (BLOCK_SCALED, FP8_RESIDENT, WGMMA_FP8, *(_with_bf16(path) for path in BF16_PATHS))
"""With 8-bit activations where they pay, and with bf16 ones below."""
NVFP4_PATHS = (BLOCK_SCALED_NVFP4, *(_with_bf16(path) for path in BF16_PATHS))
"""With NVFP4 activations, likewise."""
PARTS_PATHS = (OWN_LIST_PARTS, LIST_PARTS)
"""Up to the sum of a token's experts. Whoever would run another path adds up by itself."""
