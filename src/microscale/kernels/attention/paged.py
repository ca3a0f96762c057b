"""``triton_paged``: paged attention on any GPU with bf16 matrix units. Owns the launches; ``hardware`` has the tiles.

Short sequences (one new token, or two) cut their keys into splits for the whole machine and merge them; long ones take
blocks of query rows. A batch that mixes both takes both ways, so that a decoding sequence with much context does not
hold up a prefill. Grids follow from sizes that the host knows (tokens, sequences, width of the page
table); lengths are read on the device.

Where all sequences decode, norms and rotation of the new heads and the KV write are in the same launch
(``run_fused``); with drafts only for some heads (``paths.verifies``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.attention import HEAD_DIMS, AttentionTile, Kv, split_kv, wanted_splits
from microscale.hardware.triton_faults import USED_BY
from microscale.kernels import binding
from microscale.kernels.attention import fused_decode_jit, fused_verify_jit, paged_jit, paths, split_kv_jit, widen
from microscale.kernels.attention.cost import attention_flops, kv_bytes
from microscale.kernels.attention.fused_decode import HeadTransform
from microscale.kernels.attention.op import AttentionOp, AttentionPath, FusedPath
from microscale.kernels.attention.paths import Split, most_splits, parts_of, short_len, tile_of
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.attention.widen import COPY
from microscale.kernels.last_program import last_program_counters
from microscale.kernels.launch import launch
from microscale.kernels.op import Activations, Cost, Reason

if TYPE_CHECKING:
    from torch import Tensor

MAX_GROUP = 16
MERGE_WARPS = 4
NO_WINDOW = 1 << 30
"""Wider than any context: a layer without a window sees everything."""
MMA = r"mma\.sync\S*bf16|wgmma\S*bf16|tcgen05\.mma"


PDL_OPTION: dict[bool, dict[str, Any]] = {False: {}, True: {"launch_pdl": True}}


def uses_pdl(gpu: Gpu) -> bool:
    """A kernel for short sequences waits for the one before it by itself, where the GPU can. Without that there is
    nothing to fetch early either."""
    return gpu.has(Feature.PDL) and not binding.PLAIN


def compile_options(tile: AttentionTile) -> dict[str, Any]:
    """Options of a launch."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return options if tile.registers is None else options | {"maxnreg": tile.registers}


def spills_because(tile: AttentionTile, head_dim: int) -> str | None:
    """Why a tile for long queries may spill."""
    if head_dim == 512 and tile.block_m == 64:
        return "64 rows of 512 fill the registers; 32 rows need none of it and reach 82 TFLOP/s and not 171 on H200"
    if head_dim == 256 and tile.block_m * tile.block_n == 128 * 64:
        return "128 x 64 of 256 fill the registers; 128 x 32 need none of it and reach 248 TFLOP/s and not 318 on H200"
    if head_dim == 64 and tile.registers == 168:
        return "one word, before and after the loops (Triton 3.7); with a program less on an SM 316 TFLOP/s and not 375"
    return None


# (device, heads) → sinks of minus infinity. Kept: filling them at every call would be a launch of its own.
_NO_SINKS: dict[tuple[torch.device, int], Tensor] = {}


def _no_sinks(q: Tensor) -> Tensor:
    """Sinks that take no part, for ``q [tokens, heads, head_dim]``."""
    key = (q.device, q.shape[1])
    if key in _NO_SINKS:
        return _NO_SINKS[key]
    sinks = torch.full((q.shape[1],), -math.inf, dtype=q.dtype, device=q.device)
    # Filled while a graph is captured, they are that graph's alone, and hold nothing before it is replayed.
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        _NO_SINKS[key] = sinks
    return sinks


@dataclass(frozen=True)
class _Call:
    """One call, as both kernels see it."""

    spec: AttentionSpec
    gpu: Gpu
    q: Tensor
    kv: PagedKv
    batch: AttentionBatch
    sinks: Tensor
    out: Tensor
    transform: HeadTransform | None = None
    """Where ``q`` is the projection's whole answer: what becomes of its heads."""

    @classmethod
    def of(
        cls, spec: AttentionSpec, gpu: Gpu, q: Tensor, kv: PagedKv, batch: AttentionBatch, sinks: Tensor | None,
        transform: HeadTransform | None = None,
    ) -> _Call:  # fmt: skip
        """With room for the answer, and sinks that take no part where there are none."""
        out = torch.empty((q.shape[0], spec.num_heads, spec.head_dim), dtype=q.dtype, device=q.device)
        return cls(spec, gpu, q, kv, batch, _no_sinks(out) if sinks is None else sinks, out, transform)

    @property
    def fp8(self) -> bool:
        return self.kv.k.dtype == torch.uint8

    @property
    def group(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def sequences(self) -> int:
        return self.batch.sizes[0]

    @property
    def verifies(self) -> bool:
        """Whether several new tokens of a sequence come straight from the projection."""
        return self.transform is not None and self.batch.sizes[1] > 1

    def tile(self, decode: bool) -> AttentionTile:
        return tile_of(self.spec, self.gpu, self.fp8, decode=decode, fused=self.transform is not None)

    @property
    def short_len(self) -> int:
        return short_len(self.spec, self.tile(decode=True))

    def lookups(self) -> tuple[Tensor, ...]:
        kv, batch = self.kv, self.batch
        k_scale, v_scale = (self.q if scale is None else scale for scale in (kv.k_scale, kv.v_scale))
        return batch.query_start, batch.context_lens, batch.page_table, k_scale, v_scale

    def sizes(self) -> tuple[int, ...]:
        return self.sequences, self.spec.window or NO_WINDOW, self.kv.page_size.bit_length() - 1

    def words(self) -> tuple[Tensor, Tensor]:
        """Keys and values as the kernels read them: E4M3 numbers in pairs."""
        k, v = self.kv.k, self.kv.v
        return (k.view(torch.int16), v.view(torch.int16)) if self.fp8 else (k, v)

    def strides(self) -> tuple[int, ...]:
        (k, _), scale = self.words(), self.kv.k_scale
        per_head = 0 if scale is None or scale.numel() == 1 else 1
        rows = (self.q.stride(0), self.out.stride(0))
        return *rows, k.stride(0), k.stride(1), self.batch.page_table.stride(0), per_head

    def run_short(self, way: Split) -> None:
        """Sequences of up to ``short_len`` new tokens; the others are left alone."""
        tile, device, kv_heads = self.tile(decode=True), self.q.device, self.spec.num_kv_heads
        by_heads = split_kv(self.spec.head_dim, self.gpu, Kv.of(self.fp8))
        per_sm = by_heads.splits_per_sm
        if self.transform is not None and tile.registers is not None:
            per_sm = self.gpu.registers_per_sm // (32 * tile.warps * tile.registers)
        parts = parts_of(self.spec, tile) if self.verifies else 1
        wanted = wanted_splits(kv_heads * parts, per_sm, self.gpu)
        least = by_heads.least_blocks(tile)
        split, inside = way is not Split.ONE_PASS, way is Split.LAST_PROGRAM
        most = most_splits(self.spec, self.batch.sizes[2], tile, self.gpu, fused=self.transform is not None)
        # Each sequence may have one more than its share.
        programs = min(self.sequences + wanted, self.sequences * most) if split else self.sequences
        rows = programs * kv_heads * parts * tile.block_m if split else 0
        sums = torch.empty((rows, self.spec.head_dim), dtype=torch.float32, device=device)
        summary = torch.empty((rows, 2), dtype=torch.float32, device=device)
        spans = torch.empty((0 if inside else self.sequences, 2), dtype=torch.int32, device=device)
        counters = last_program_counters(device, self.sequences * kv_heads * parts) if inside else spans
        attend, group, others, constants = self._kernel(tile, parts)
        arguments = (
            self.q, *self.words(), self.sinks, self.out, sums, summary, spans, counters,
            *self.lookups(), *self.sizes(), *group, wanted, least, self.spec.softmax_scale, *self.strides(), *others,
        )  # fmt: skip
        pdl = uses_pdl(self.gpu)
        constants |= {
            "HEAD_DIM": self.spec.head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SPLIT": split,
            "INSIDE": inside, "PREFETCH": tile.prefetch if pdl else 0, "PDL": pdl, "PLAIN": binding.PLAIN,
        }  # fmt: skip
        options = compile_options(tile) | PDL_OPTION[pdl]
        launch(attend, (programs, kv_heads * parts), arguments, constants, options, MMA)
        if way is Split.MERGE:
            self._merge(sums, summary, spans, tile, parts)

    def _kernel(self, tile: AttentionTile, parts: int) -> tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]:
        """The kernel for short sequences, and its arguments and constants that others do not have: the group, which is
        a constant where drafts are verified, and the heads' norms and rotation."""
        if self.transform is None:
            return paged_jit.attend_short, (self.group,), (), {"KV_FP8": self.fp8}
        if self.verifies:
            constants = {"GROUP": self.group, "PARTS": parts}
            return fused_verify_jit.attend_verify, (), self.transform.rotation, constants
        norm, norm_v, shared = self.transform.kind
        constants = {"KV_FP8": self.fp8, "EARLY": tile.early, "NORM": norm, "NORM_V": norm_v, "SHARED": shared}
        return fused_decode_jit.attend_fused, (self.group,), self.transform.arguments(self.q), constants

    def _merge(self, sums: Tensor, summary: Tensor, spans: Tensor, tile: AttentionTile, parts: int) -> None:
        arguments = (sums, summary, spans, self.out, self.batch.query_start, self.group, self.out.stride(0))
        pdl = uses_pdl(self.gpu)
        constants = {"HEAD_DIM": self.spec.head_dim, "BLOCK_M": tile.block_m, "PDL": pdl, "PLAIN": binding.PLAIN}
        constants["PARTS"] = parts
        grid = (self.sequences, self.spec.num_heads)
        launch(split_kv_jit.merge_splits, grid, arguments, constants, {"num_warps": MERGE_WARPS} | PDL_OPTION[pdl])

    def widened(self, short_len: int) -> _Call:
        """The same over a bf16 copy of what sequences of more than ``short_len`` new tokens see."""
        window = self.spec.window or NO_WINDOW
        kv, batch = widen.widen(self.spec, self.gpu, self.kv, self.batch, window, short_len)
        kv = replace(kv, k_scale=self.kv.k_scale, v_scale=self.kv.v_scale)
        return replace(self, kv=kv, batch=batch)

    def run_long(self, short_len: int) -> None:
        """Sequences of more than ``short_len`` new tokens."""
        tile = self.tile(decode=False)
        blocks = self.q.shape[0] // (tile.block_m // self.group) + self.sequences
        arguments = (
            self.q, *self.words(), self.sinks, self.out, *self.lookups(),
            *self.sizes(), self.group, short_len, self.spec.softmax_scale, *self.strides(),
        )  # fmt: skip
        scaled = not self.fp8 and self.kv.k_scale is not None
        constants = {
            "HEAD_DIM": self.spec.head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "KV_FP8": self.fp8,
            "SCALED": scaled, "PLAIN": binding.PLAIN,
        }  # fmt: skip
        grid, options = (blocks, self.spec.num_kv_heads), compile_options(tile)
        reason = spills_because(tile, self.spec.head_dim)
        launch(paged_jit.attend_long, grid, arguments, constants, options, MMA, reason)


def _attend(
    way: Split | None, long: bool, copied: bool, spec: AttentionSpec, gpu: Gpu, q: Tensor, kv: PagedKv,
    batch: AttentionBatch, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """``way``: of the short sequences; ``None`` where all are long. ``long``: whether some are long. ``copied``: those
    read a bf16 copy of the keys and values."""
    call = _Call.of(spec, gpu, q, kv, batch, sinks)
    if not q.shape[0]:
        return call.out
    if way is not None:
        call.run_short(way)
    if long:
        short_len = 0 if way is None else call.short_len
        (call.widened(short_len) if copied else call).run_long(short_len)
    return call.out


def _fused(
    way: Split, spec: AttentionSpec, gpu: Gpu, qkv: Tensor, transform: HeadTransform, kv: PagedKv,
    batch: AttentionBatch, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    call = _Call.of(spec, gpu, qkv.contiguous(), kv, batch, sinks, transform)
    if qkv.shape[0]:
        call.run_short(way)
    return call.out


USES = USED_BY["paged attention"]
COPIED_ONCE = "each key is converted once, and not for every block of query rows"


def _path(name: str, because: Reason, supports: paths.Supports, way: Split | None, *, long: bool = True,
          copied: bool = False) -> AttentionPath:  # fmt: skip
    return AttentionPath(name, because, supports, partial(_attend, way, long, copied), uses=USES)


_WIDENED_MIXES = (
    _path(f"mixed, {way}, {COPY}", COPIED_ONCE, paths.widens(paths.mixes(way)), way, copied=True) for way in Split
)
PATHS = (
    *(_path(f"decode, {way}", way.because, paths.decodes(way), way, long=False) for way in Split),
    _path(f"prefill, {COPY}", COPIED_ONCE, paths.widens(paths.prefills), None, copied=True),
    _path("prefill", "no sequence decodes", paths.prefills, None),
    *_WIDENED_MIXES,
    *(_path(f"mixed, {way}", way.because, paths.mixes(way), way) for way in Split),
)
FUSED_PATHS = tuple(
    FusedPath(f"fused {kind}, {way}", way.because, supports(way), partial(_fused, way), uses=USES)
    for kind, supports in (("decode", paths.fuses), ("verify", paths.verifies))
    for way in Split
)


class PagedAttention(AttentionOp):
    """Keys and values straight from the pages, softmax on the way, in bf16 with float32 sums."""

    name = "triton_paged"
    uncapturable = None
    paths = PATHS
    fused_paths = FUSED_PATHS

    def supports(self, spec: AttentionSpec, gpu: Gpu) -> Reason | None:
        if not gpu.has(Feature.MMA_BF16):
            return f"needs {Feature.MMA_BF16}, which {gpu.name} does not have"
        if spec.activations is not Activations.BF16:
            return f"takes bf16 activations, not {spec.activations}"
        if spec.head_dim not in HEAD_DIMS:
            return f"has head sizes {', '.join(map(str, HEAD_DIMS))}, not {spec.head_dim}"
        if spec.num_heads % spec.num_kv_heads or spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            return f"takes up to {MAX_GROUP} query heads per KV head, not {spec.num_heads} over {spec.num_kv_heads}"
        if spec.page_size & (spec.page_size - 1):
            return f"needs a page size that is a power of two, not {spec.page_size}"
        return None

    def cost(self, spec: AttentionSpec, gpu: Gpu) -> Cost:
        return Cost(kv_bytes(spec), attention_flops(spec), efficiency=0.5)
