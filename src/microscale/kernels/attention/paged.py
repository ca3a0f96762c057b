"""``triton_paged``: paged attention on any GPU with bf16 matrix units. Owns the launches; ``tiles`` has the tiles.

Short sequences (one new token, or two) cut their keys into splits for the whole machine and merge them; long ones take
blocks of query rows. A batch that mixes both takes both ways, so that a decoding sequence with much context does not
hold up a prefill. Grids follow from sizes that the host knows (tokens, sequences, width of the page
table); lengths are read on the device.

Where all sequences decode, norms and rotation of the new heads and the KV write are in the same launch (``run_fused``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.kernels.attention import fused_decode, fused_decode_jit, paged_jit, split_kv_jit
from microscale.kernels.attention.cost import attention_flops, kv_bytes
from microscale.kernels.attention.fused_decode import HeadTransform
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.attention.tiles import (
    FUSED_SEQUENCES,
    HEAD_DIMS,
    INSIDE_SPLITS,
    SPLITS_PER_SM,
    Tile,
    choose_tile,
    compile_options,
    spills_because,
    wanted_splits,
)
from microscale.kernels.last_program import last_program_counters
from microscale.kernels.launch import PLAIN, launch
from microscale.kernels.op import Activations, Cost, Implementation, Reason

MAX_GROUP = 16
MERGE_WARPS = 4
NO_WINDOW = 1 << 30
"""Wider than any context: a layer without a window sees everything."""
MMA = r"mma\.sync\S*bf16|wgmma\S*bf16|tcgen05\.mma"


PDL_OPTION: dict[bool, dict[str, Any]] = {False: {}, True: {"launch_pdl": True}}


def uses_pdl(gpu: Gpu) -> bool:
    """A kernel for short sequences waits for the one before it by itself, where the GPU can. Without that there is
    nothing to fetch early either."""
    return gpu.has(Feature.PDL) and not PLAIN


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
    """Where ``q`` is the projection's whole answer, of one token in every sequence: what becomes of its heads."""

    @property
    def fp8(self) -> bool:
        return self.kv.k.dtype == torch.uint8

    @property
    def group(self) -> int:
        return self.spec.num_heads // self.spec.num_kv_heads

    @property
    def sequences(self) -> int:
        return self.batch.context_lens.shape[0]

    def tile(self, decode: bool) -> Tile:
        window = self.spec.window is not None
        return choose_tile(
            decode, self.spec.head_dim, self.fp8, self.gpu, window=window, heads_too=self.transform is not None
        )

    @property
    def short_len(self) -> int:
        """New tokens up to which a sequence is short: its rows fit one block."""
        return self.tile(decode=True).block_m // self.group

    def lookups(self) -> tuple[Tensor, ...]:
        kv, batch = self.kv, self.batch
        k_scale, v_scale = (self.q if scale is None else scale for scale in (kv.k_scale, kv.v_scale))
        return batch.query_start, batch.context_lens, batch.page_table, k_scale, v_scale

    def sizes(self) -> tuple[int, ...]:
        return self.sequences, self.spec.window or NO_WINDOW, self.kv.page_size.bit_length() - 1, self.group

    def words(self) -> tuple[Tensor, Tensor]:
        """Keys and values as the kernels read them: E4M3 numbers in pairs."""
        k, v = self.kv.k, self.kv.v
        return (k.view(torch.int16), v.view(torch.int16)) if self.fp8 else (k, v)

    def strides(self) -> tuple[int, ...]:
        (k, _), scale = self.words(), self.kv.k_scale
        per_head = 0 if scale is None or scale.numel() == 1 else 1
        rows = (self.q.stride(0), self.out.stride(0))
        return *rows, k.stride(0), k.stride(1), self.batch.page_table.stride(0), per_head

    def run_short(self) -> None:
        """Sequences of up to ``short_len`` new tokens; the others are left alone."""
        tile, device, kv_heads = self.tile(decode=True), self.q.device, self.spec.num_kv_heads
        max_keys = self.batch.page_table.shape[1] * self.kv.page_size
        if self.spec.window is not None:
            max_keys = min(max_keys, self.spec.window + (self.short_len if self.transform is None else 1) - 1)
        per_sm = SPLITS_PER_SM[self.spec.head_dim]
        if self.transform is not None and tile.registers is not None:
            per_sm = self.gpu.registers_per_sm // (32 * tile.warps * tile.registers)
        wanted = wanted_splits(kv_heads, per_sm, self.gpu)
        least = tile.least_blocks(self.spec.head_dim)
        most = -(-max_keys // tile.block_n) // least  # splits of a sequence
        split = most > 1
        inside = split and most <= INSIDE_SPLITS[self.spec.head_dim]
        # Each sequence may have one more than its share.
        programs = min(self.sequences + wanted, self.sequences * most) if split else self.sequences
        rows = programs * kv_heads * tile.block_m if split else 0
        partial = torch.empty((rows, self.spec.head_dim), dtype=torch.float32, device=device)
        summary = torch.empty((rows, 2), dtype=torch.float32, device=device)
        spans = torch.empty((0 if inside else self.sequences, 2), dtype=torch.int32, device=device)
        counters = last_program_counters(device, self.sequences * kv_heads) if inside else spans
        attend, others = paged_jit.attend_short, ()
        constants: dict[str, Any] = {}
        if self.transform is not None:
            attend, others = fused_decode_jit.attend_fused, self.transform.arguments(self.q)
            norm, shared = self.transform.kind
            constants = {"EARLY": tile.early, "NORM": norm, "SHARED": shared}
        arguments = (
            self.q, *self.words(), self.sinks, self.out, partial, summary, spans, counters,
            *self.lookups(), *self.sizes(), wanted, least, self.spec.softmax_scale, *self.strides(), *others,
        )  # fmt: skip
        pdl = uses_pdl(self.gpu)
        constants |= {
            "HEAD_DIM": self.spec.head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "KV_FP8": self.fp8,
            "SPLIT": split, "INSIDE": inside, "PREFETCH": tile.prefetch if pdl else 0, "PDL": pdl, "PLAIN": PLAIN,
        }  # fmt: skip
        options = compile_options(tile, self.gpu) | PDL_OPTION[pdl]
        launch(attend, (programs, kv_heads), arguments, constants, options, MMA)
        if split and not inside:
            self._merge(partial, summary, spans, tile)

    def _merge(self, partial: Tensor, summary: Tensor, spans: Tensor, tile: Tile) -> None:
        arguments = (partial, summary, spans, self.out, self.batch.query_start, self.group, self.out.stride(0))
        pdl = uses_pdl(self.gpu)
        constants = {"HEAD_DIM": self.spec.head_dim, "BLOCK_M": tile.block_m, "PDL": pdl, "PLAIN": PLAIN}
        grid = (self.sequences, self.spec.num_heads)
        launch(split_kv_jit.merge_splits, grid, arguments, constants, {"num_warps": MERGE_WARPS} | PDL_OPTION[pdl])

    def run_long(self, short_len: int) -> None:
        """Sequences of more than ``short_len`` new tokens."""
        tile = self.tile(decode=False)
        blocks = self.q.shape[0] // (tile.block_m // self.group) + self.sequences
        arguments = (
            self.q, *self.words(), self.sinks, self.out, *self.lookups(),
            *self.sizes(), short_len, self.spec.softmax_scale, *self.strides(),
        )  # fmt: skip
        constants = {
            "HEAD_DIM": self.spec.head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "KV_FP8": self.fp8,
            "PLAIN": PLAIN,
        }  # fmt: skip
        grid, options = (blocks, self.spec.num_kv_heads), compile_options(tile, self.gpu)
        reason = spills_because(tile, self.spec.head_dim)
        launch(paged_jit.attend_long, grid, arguments, constants, options, MMA, reason)


class PagedAttention(Implementation[AttentionSpec]):
    """Keys and values straight from the pages, softmax on the way, in bf16 with float32 sums."""

    op = "attention"
    name = "triton_paged"
    layout = "paged"
    uncapturable = None

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

    def run(
        self, spec: AttentionSpec, gpu: Gpu, q: Tensor, kv: PagedKv, batch: AttentionBatch, sinks: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.shape[0] == 0:
            return out
        if sinks is None:
            sinks = _no_sinks(q)
        call = _Call(spec, gpu, q, kv, batch, sinks, out)
        if batch.max_query_len <= call.short_len:
            call.run_short()
        elif call.sequences == 1:
            call.run_long(short_len=0)
        else:
            call.run_short()
            call.run_long(call.short_len)
        return out

    def run_fused(
        self, spec: AttentionSpec, gpu: Gpu, qkv: Tensor, heads: HeadTransform, kv: PagedKv, batch: AttentionBatch,
        sinks: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """What ``small.rope_and_write_kv`` and ``run`` do, of ``qkv [tokens, all heads, head_dim]``; ``None`` where
        it is not one launch. Position and slot of each token follow from its sequence's length and pages."""
        group = spec.num_heads // spec.num_kv_heads
        possible = heads.kind in fused_decode.kinds(spec.head_dim) and group <= fused_decode.MAX_HEADS
        few = batch.context_lens.shape[0] <= FUSED_SEQUENCES[spec.head_dim]
        if not few or not possible or batch.max_query_len != 1 or not gpu.has(Feature.PDL):
            return None
        out = torch.empty((qkv.shape[0], spec.num_heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
        if qkv.shape[0]:
            sinks = _no_sinks(out) if sinks is None else sinks
            _Call(spec, gpu, qkv.contiguous(), kv, batch, sinks, out, heads).run_short()
        return out
