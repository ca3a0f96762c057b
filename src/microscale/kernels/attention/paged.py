"""``triton_paged``: paged attention on any GPU with bf16 matrix units. Owns the launches; ``tiles`` has the tiles.

Short sequences (one new token, or two) cut their keys into pieces for the whole machine and merge them; long ones take
blocks of query rows. A batch that mixes both takes both ways, so that a decoding sequence with much context does not
hold up a prefill. Grids follow from sizes that the host knows (tokens, sequences, width of the page
table); lengths are read on the device.

Where all sequences decode, norms and rotation of the new heads and the KV write are in the same launch (``run_fresh``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.kernels.arrivals import arrivals
from microscale.kernels.attention import fresh, fresh_jit, paged_jit, pieces_jit
from microscale.kernels.attention.cost import attention_flops, kv_bytes
from microscale.kernels.attention.fresh import Fresh
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.attention.tiles import (
    FRESH_SEQUENCES,
    HEAD_DIMS,
    INSIDE_PIECES,
    PIECES_PER_SM,
    Tile,
    choose_tile,
    compile_options,
    wanted_pieces,
)
from microscale.kernels.op import Activations, Cost, Implementation, Reason, Variant

MAX_GROUP = 16
MERGE_WARPS = 4
NO_WINDOW = 1 << 30
"""Wider than any context: a layer without a window sees everything."""
MMA = r"mma\.sync\S*bf16|wgmma\S*bf16|tcgen05\.mma"


def pdl_options(gpu: Gpu) -> dict[str, Any]:
    """A kernel for short sequences waits for the one before it by itself, where the GPU can."""
    plain = triton.knobs.runtime.interpret
    options: dict[str, Any] = {"PDL": gpu.has(Feature.PDL) and not plain, "PLAIN": plain}
    return options | {"launch_pdl": True} if options["PDL"] else options


def prefetched(tile: Tile, gpu: Gpu) -> int:
    """Without a launch that overlaps the one before there is nothing to fetch early."""
    return tile.prefetch if gpu.has(Feature.PDL) and not triton.knobs.runtime.interpret else 0


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
    fresh: Fresh | None = None
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
            decode, self.spec.head_dim, self.fp8, self.gpu, window=window, heads_too=self.fresh is not None
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
            max_keys = min(max_keys, self.spec.window + (self.short_len if self.fresh is None else 1) - 1)
        per_sm = PIECES_PER_SM[self.spec.head_dim]
        if self.fresh is not None and tile.registers is not None:
            per_sm = self.gpu.registers_per_sm // (32 * tile.warps * tile.registers)
        wanted = wanted_pieces(kv_heads, per_sm, self.gpu)
        least = tile.least_blocks(self.spec.head_dim)
        most = -(-max_keys // tile.block_n) // least  # pieces of a sequence
        split = most > 1
        inside = split and most <= INSIDE_PIECES[self.spec.head_dim]
        # Each sequence may have one more than its share.
        programs = min(self.sequences + wanted, self.sequences * most) if split else self.sequences
        rows = programs * kv_heads * tile.block_m if split else 0
        partial = torch.empty((rows, self.spec.head_dim), dtype=torch.float32, device=device)
        summary = torch.empty((rows, 2), dtype=torch.float32, device=device)
        spans = torch.empty((0 if inside else self.sequences, 2), dtype=torch.int32, device=device)
        counters = arrivals(device, self.sequences * kv_heads) if inside else spans
        attend, others, constants = paged_jit.attend_short, (), {}
        if self.fresh is not None:
            attend, others, (norm, shared) = fresh_jit.attend_fresh, self.fresh.arguments(self.q), self.fresh.kind
            constants = {"EARLY": tile.early, "NORM": norm, "SHARED": shared}
        attend[(programs, kv_heads)](
            self.q, *self.words(), self.sinks, self.out, partial, summary, spans, counters,
            *self.lookups(), *self.sizes(), wanted, least, self.spec.softmax_scale, *self.strides(), *others,
            HEAD_DIM=self.spec.head_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, KV_FP8=self.fp8, SPLIT=split,
            INSIDE=inside, PREFETCH=prefetched(tile, self.gpu), **constants, **compile_options(tile, self.gpu),
            **pdl_options(self.gpu),
        )  # fmt: skip
        if split and not inside:
            pieces_jit.merge_pieces[(self.sequences, self.spec.num_heads)](
                partial, summary, spans, self.out, self.batch.query_start, self.group, self.out.stride(0),
                HEAD_DIM=self.spec.head_dim, BLOCK_M=tile.block_m, **pdl_options(self.gpu), num_warps=MERGE_WARPS,
            )  # fmt: skip

    def run_long(self, short_len: int) -> None:
        """Sequences of more than ``short_len`` new tokens."""
        tile = self.tile(decode=False)
        blocks = self.q.shape[0] // (tile.block_m // self.group) + self.sequences
        paged_jit.attend_long[(blocks, self.spec.num_kv_heads)](
            self.q, *self.words(), self.sinks, self.out, *self.lookups(),
            *self.sizes(), short_len, self.spec.softmax_scale, *self.strides(),
            HEAD_DIM=self.spec.head_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, KV_FP8=self.fp8,
            PLAIN=triton.knobs.runtime.interpret,
            **compile_options(tile, self.gpu),
        )  # fmt: skip


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

    def run_fresh(
        self, spec: AttentionSpec, gpu: Gpu, qkv: Tensor, heads: Fresh, kv: PagedKv, batch: AttentionBatch,
        sinks: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """What ``small.rope_and_write_kv`` and ``run`` do, of ``qkv [tokens, all heads, head_dim]``; ``None`` where
        it is not one launch. Position and slot of each token follow from its sequence's length and pages."""
        possible = heads.kind in fresh.kinds(spec.head_dim) and spec.num_heads // spec.num_kv_heads <= fresh.MAX_HEADS
        few = batch.context_lens.shape[0] <= FRESH_SEQUENCES[spec.head_dim]
        if not few or not possible or batch.max_query_len != 1 or not gpu.has(Feature.PDL):
            return None
        out = torch.empty((qkv.shape[0], spec.num_heads, spec.head_dim), dtype=qkv.dtype, device=qkv.device)
        if qkv.shape[0]:
            sinks = _no_sinks(out) if sinks is None else sinks
            _Call(spec, gpu, qkv.contiguous(), kv, batch, sinks, out, heads).run_short()
        return out

    def variants(self, gpu: Gpu) -> Iterator[Variant]:
        for head_dim in HEAD_DIMS:
            for fp8 in (False, True):
                ways = [(True, False), (False, False)] + ([(True, True)] if INSIDE_PIECES[head_dim] else [])
                for split, inside in ways:
                    yield _short_variant(choose_tile(True, head_dim, fp8, gpu), head_dim, fp8, gpu, split, inside)
                    if gpu.has(Feature.PDL):
                        tile = choose_tile(True, head_dim, fp8, gpu, heads_too=True)
                        beside = _short_variant(tile, head_dim, fp8, gpu, split, inside)
                        for kind in fresh.kinds(head_dim):
                            yield fresh.make_variant(beside, tile.early, *kind)
                tiles = {choose_tile(False, head_dim, fp8, gpu, window=window): window for window in (True, False)}
                for tile, window in tiles.items():
                    yield _long_variant(head_dim, fp8, gpu, tile, "_window" if window else "")
            yield _merge_variant(head_dim, gpu)


def _arguments(fp8: bool, *, short: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """The signature of a kernel, and which of its arguments are divisible by 16."""
    kv, scale = ("*i16", "*fp32") if fp8 else ("*bf16", "*bf16")
    pointers = {"q_ptr": "*bf16", "k_ptr": kv, "v_ptr": kv, "sinks_ptr": "*bf16", "out_ptr": "*bf16"}
    if short:
        pointers |= {"partial_ptr": "*fp32", "summary_ptr": "*fp32", "spans_ptr": "*i32", "arrivals_ptr": "*i32"}
    pointers |= dict.fromkeys(("query_start_ptr", "context_lens_ptr", "page_table_ptr"), "*i32")
    pointers |= {"k_scale_ptr": scale, "v_scale_ptr": scale}
    numbers = ("num_sequences", "window", "page_shift", "group", *(("wanted", "least") if short else ("short_len",)))
    strides = ("stride_q_token", "stride_out_token", "stride_page", "stride_kv_head")
    others = ("stride_table", "stride_scale")
    signature = pointers | dict.fromkeys(numbers, "i32") | {"scale": "fp32"} | dict.fromkeys((*strides, *others), "i32")
    return signature, (*pointers, *strides)


def _short_variant(tile: Tile, head_dim: int, fp8: bool, gpu: Gpu, split: bool, inside: bool) -> Variant:
    signature, divisible = _arguments(fp8, short=True)
    options = compile_options(tile, gpu) | pdl_options(gpu) | {"PDL": gpu.has(Feature.PDL), "PLAIN": False}
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "KV_FP8": fp8, "SPLIT": split,
        "INSIDE": inside, "PREFETCH": tile.prefetch if gpu.has(Feature.PDL) else 0,
        "PDL": options.pop("PDL"), "PLAIN": options.pop("PLAIN"),
    }  # fmt: skip
    name = f"short_d{head_dim}_{'fp8' if fp8 else 'bf16'}{'_split' if split else ''}{'_inside' if inside else ''}"
    fn = paged_jit.attend_short
    return Variant("attention", PagedAttention.name, name, fn, signature, constants, options, divisible, promise=MMA)


def _long_variant(head_dim: int, fp8: bool, gpu: Gpu, tile: Tile, kind: str) -> Variant:
    signature, divisible = _arguments(fp8, short=False)
    constants = {
        "HEAD_DIM": head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "KV_FP8": fp8, "PLAIN": False,
    }  # fmt: skip
    name = f"long_d{head_dim}_{'fp8' if fp8 else 'bf16'}{kind}"
    fn, options = paged_jit.attend_long, compile_options(tile, gpu)
    reason = None
    if head_dim == 512 and tile.block_m == 64:
        reason = "64 rows of 512 fill the registers; 32 rows need none of it and reach 82 TFLOP/s and not 171 on H200"
    if head_dim == 256 and tile.block_m * tile.block_n == 128 * 64:
        reason = (
            "128 x 64 of 256 fill the registers; 128 x 32 need none of it and reach 248 TFLOP/s and not 318 on H200"
        )
    if head_dim == 64 and tile.registers == 168:
        reason = (
            "one word, before and after the loops (Triton 3.7); with a program less on an SM 316 TFLOP/s and not 375"
        )
    return Variant(
        "attention", PagedAttention.name, name, fn, signature, constants, options, divisible, MMA, reason
    )  # fmt: skip


def _merge_variant(head_dim: int, gpu: Gpu) -> Variant:
    fn = pieces_jit.merge_pieces
    pdl = gpu.has(Feature.PDL)
    block_m = choose_tile(True, head_dim, False, gpu).block_m
    constants = {"HEAD_DIM": head_dim, "BLOCK_M": block_m, "PDL": pdl, "PLAIN": False}
    pointers = {"partial_ptr": "*fp32", "summary_ptr": "*fp32", "spans_ptr": "*i32", "out_ptr": "*bf16"}
    pointers |= {"query_start_ptr": "*i32"}
    signature = pointers | {"group": "i32", "stride_out_token": "i32"}
    options: dict[str, Any] = {"num_warps": MERGE_WARPS} | ({"launch_pdl": True} if pdl else {})
    divisible = (*pointers, "stride_out_token")
    return Variant("attention", PagedAttention.name, f"merge_d{head_dim}", fn, signature, constants, options, divisible)
