"""``triton_paged``: paged attention on any GPU with bf16 matrix units. Owns the tiles and the launches.

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
from microscale.kernels.op import Activations, Cost, Implementation, Reason, Variant

HEAD_DIMS = (64, 128, 256, 512)
MAX_GROUP = 16
# Head size → pieces that an SM works on at once, by its registers.
PIECES_PER_SM = {64: 4, 128: 3, 256: 3, 512: 1}
# Head size → keys in a piece, at least: less is not worth a merge. Gemma 4 on H200, one token at a context of 160, 30
# layers: 1579 µs with 32 keys of 256, 1663 with 64, 1692 with 128; at 1000 no difference.
LEAST_KEYS = {64: 256, 128: 128, 256: 32, 512: 64}
# Head size → pieces of a sequence up to which the last program adds them up. The width of the page table or the window
# bounds them; a window of 1024 is 33 pieces of 32 keys. Gemma 4's sliding layers have two rows of 256 in a piece, 2 KB;
# its full layers have eight of 512, 16 KB. gpt-oss has eight of 64, 2 KB, and tables of 2048 keys are eight pieces.
INSIDE_PIECES = {64: 8, 128: 0, 256: 40, 512: 0}
MERGE_WARPS = 4
NO_WINDOW = 1 << 30
"""Wider than any context: a layer without a window sees everything."""
# Head size → sequences up to which decoding steps take their heads straight from the projection, in one launch. Its
# kernel needs more registers, and with many programs an SM holds fewer of them (H200, 24 layers of gpt-oss-20b: one
# sequence 1118 us and 1149 apart, 8 sequences the same, 64 of 576 tokens 6201 and 6076; 30 of Gemma 4: 64 of 576 tokens
# 10,648 and 10,857).
FRESH_SEQUENCES = {64: 8, 128: 8, 256: 64, 512: 64}
MMA = r"mma\.sync\S*bf16|wgmma\S*bf16|tcgen05\.mma"


@dataclass(frozen=True)
class Tile:
    """One configuration of the kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    """The most registers a thread may have; without it, what ``compile_options`` says."""
    prefetch: int = 0
    """Keys of a piece that go to L2 while the kernel before runs, where the GPU can do that (decode)."""
    early: int = 0
    """1: the keys of a piece's first block, 2: and its values come to registers while the kernel before runs
    (``attend_fresh``); then ``prefetch`` counts from the second block on."""

    def least_blocks(self, head_dim: int) -> int:
        """Blocks of keys in a piece, at least."""
        return max(1, LEAST_KEYS[head_dim] // self.block_n)

    def shared_bytes(self, head_dim: int, kv_size: int, decode: bool) -> int:
        """An upper bound: the queries, keys and values in flight, the softmax's weights and 4 KiB for reductions.

        Triton keeps ``stages - 1`` tiles in flight, and one fewer in decode, where the pages' numbers take a stage.
        E4M3 tiles are converted in registers and go through shared memory once more as bf16.
        """
        tile = self.block_n * head_dim
        in_flight = max(1, self.stages - (2 if decode else 1)) * 2 * tile * kv_size + (2 * tile if kv_size == 1 else 0)
        return self.block_m * head_dim * 2 + in_flight + 2 * self.block_n * self.block_m + (4096 if decode else 1024)


# Head size → tiles from most to least wanted; the first that fits the card's shared memory is taken. Blocks shrink as
# heads grow, so that accumulator, scores and one tile of values stay in 255 registers.
_PREFILL = {
    # 8192 tokens on H200, triton 3.6: 334 TFLOP/s; 128 x 64 with 4 warps 326, 64 x 128 315, 128 x 32 271.
    64: (Tile(64, 64, 4, 3),),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    256: (Tile(64, 32, 8, 2),),
    # 4096 tokens on H200: 171 TFLOP/s; 32 x 32 82, 64 x 16 105.
    512: (Tile(64, 32, 8, 2), Tile(32, 32, 8, 2), Tile(16, 16, 8, 2)),
}
# Three programs an SM for heads of 64 (8192 tokens: 375 TFLOP/s; 64 x 64 with four 358, with what ptxas takes 327);
# with a window most blocks are masked in part, and smaller ones win (158 us and 216). Heads of 256, a prompt of 2048,
# window 1024: 108 us; 128 x 32 138, 64 x 32 236.
_PREFILL_WGMMA = _PREFILL | {64: (Tile(64, 128, 4, 3, 168),), 256: (Tile(128, 64, 8, 2),)}
_PREFILL_WINDOW_WGMMA = _PREFILL_WGMMA | {64: (Tile(64, 64, 4, 3, 128),)}
# 64 rows of 256 spill 248 bytes while they convert.
_PREFILL_FP8 = _PREFILL | {256: (Tile(32, 32, 8, 2, 255),), 512: (Tile(32, 32, 8, 2), Tile(16, 16, 8, 2))}
# Without wgmma or tcgen05 the operands stand in registers too: smaller blocks, or they spill.
_PREFILL_MMA = _PREFILL_FP8 | {64: (Tile(64, 32, 4, 3),), 128: (Tile(64, 32, 4, 3),), 256: _PREFILL[256]}
# 32 rows of 512 in FP8 spill 216 bytes on SM 8.0 (Triton 3.7).
_PREFILL_MMA_FP8 = _PREFILL_FP8 | {64: (Tile(64, 32, 4, 3),), 128: (Tile(64, 32, 8, 2),), 512: (Tile(16, 32, 8, 2),)}
_DECODE = {
    64: (Tile(16, 128, 4, 3),),  # 8 sequences of 8192 on H200: 46 µs; 16 x 64 with 2 warps 46, others 51 to 98
    128: (Tile(16, 64, 4, 3),),
    256: (Tile(16, 32, 4, 3), Tile(16, 32, 4, 2)),
    # 8 sequences of 8192 on H200: 85 µs; 16 x 32 107.
    512: (Tile(16, 64, 8, 3, 255), Tile(16, 32, 8, 3), Tile(16, 16, 8, 3)),
}
# The first keys are on their way before the queries are: at short contexts attention is nothing but latency.
_DECODE_WGMMA = _DECODE | {
    256: (Tile(16, 32, 4, 3, 168, prefetch=32),),
    512: (Tile(16, 64, 8, 3, 255, prefetch=64),),
}
# 64 keys of 512 spill 44 bytes.
_DECODE_TCGEN05 = _DECODE | {512: _DECODE[512][1:]}
# With 168 registers they spill 8 bytes on SM 12.x (Triton 3.6) and 36 on SM 10.x; heads of 256 24 on SM 10.x.
_DECODE_FP8 = _DECODE | {
    64: (Tile(16, 128, 4, 3, 255),),
    256: (Tile(16, 32, 4, 3, 255), Tile(16, 32, 4, 2, 255)),
    512: _DECODE[512][1:],
}
# 8 sequences of 8192 on H200: 34 µs, four programs an SM; with 168 registers three, 45; 16 x 64 37 to 49.
_DECODE_FP8_WGMMA = _DECODE_FP8 | {
    64: (Tile(16, 128, 4, 3, 128),),
    256: _DECODE[256],
    512: (Tile(16, 32, 8, 3, 255),),  # left alone, ptxas stops at 128 and spills 8 bytes (Triton 3.6)
}

# With the newest heads' tile, and a first block of keys and values, in registers too.
_FRESH: dict[int, tuple[Tile, ...]] = {
    64: (Tile(16, 128, 4, 3, 255, prefetch=128, early=2),),
    128: (Tile(16, 64, 4, 3, 255, prefetch=64, early=2),),
    256: (Tile(16, 32, 4, 3, 255, prefetch=32, early=2),),
    512: (Tile(16, 16, 8, 3, 255, prefetch=64, early=2),),
}
_FRESH_FP8 = _FRESH | {512: (Tile(16, 32, 8, 3, 255, prefetch=64),)}
_FRESH_64 = {64: (Tile(16, 128, 4, 3, 168, early=2),)}
# H200, one token of Gemma 4 at a context of 192, 30 layers: 256 without a block in registers 1499 us, with 1530; 512
# in blocks of 16 with one 1496, of 32 without 1530 (16 x 32 with one spills 16 bytes).
_FRESH_WGMMA = _FRESH | _FRESH_64 | {256: (Tile(16, 32, 4, 3, 255, prefetch=32),)}
_FRESH_FP8_WGMMA = _FRESH_FP8 | _FRESH_64


def _operands_in_shared_memory(gpu: Gpu) -> bool:
    """Whether large products read their operands from shared memory, and not from registers."""
    return gpu.has(Feature.WGMMA) or gpu.has(Feature.TCGEN05)


def compile_options(tile: Tile, gpu: Gpu) -> dict[str, Any]:
    """Options of a launch. Left alone, ptxas may stop at 128 registers and spill (8 bytes, decode of 512, SM120)."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers is not None:
        return options | {"maxnreg": tile.registers}
    return options if _operands_in_shared_memory(gpu) else options | {"maxnreg": 255}


def pdl_options(gpu: Gpu) -> dict[str, Any]:
    """A kernel for short sequences waits for the one before it by itself, where the GPU can."""
    plain = triton.knobs.runtime.interpret
    options: dict[str, Any] = {"PDL": gpu.has(Feature.PDL) and not plain, "PLAIN": plain}
    return options | {"launch_pdl": True} if options["PDL"] else options


def prefetched(tile: Tile, gpu: Gpu) -> int:
    """Without a launch that overlaps the one before there is nothing to fetch early."""
    return tile.prefetch if gpu.has(Feature.PDL) and not triton.knobs.runtime.interpret else 0


def _decode_tiles(fp8: bool, gpu: Gpu) -> dict[int, tuple[Tile, ...]]:
    if gpu.has(Feature.WGMMA):
        return _DECODE_FP8_WGMMA if fp8 else _DECODE_WGMMA
    if fp8:
        return _DECODE_FP8
    return _DECODE_TCGEN05 if gpu.has(Feature.TCGEN05) else _DECODE


def choose_tile(
    decode: bool, head_dim: int, fp8: bool, gpu: Gpu, *, window: bool = False, heads_too: bool = False
) -> Tile:
    """The best tile whose shared memory fits; the last one fits every card. ``heads_too``: for ``attend_fresh``."""
    if heads_too:
        tiles = ((_FRESH_WGMMA, _FRESH_FP8_WGMMA) if gpu.has(Feature.WGMMA) else (_FRESH, _FRESH_FP8))[fp8]
    elif decode:
        tiles = _decode_tiles(fp8, gpu)
    elif gpu.has(Feature.WGMMA) and not fp8:
        tiles = _PREFILL_WINDOW_WGMMA if window else _PREFILL_WGMMA
    elif _operands_in_shared_memory(gpu):
        tiles = _PREFILL_FP8 if fp8 else _PREFILL
    else:
        tiles = _PREFILL_MMA_FP8 if fp8 else _PREFILL_MMA
    size = 1 if fp8 else 2
    choices = tiles[head_dim]
    return next(
        (tile for tile in choices if tile.shared_bytes(head_dim, size, decode) <= gpu.shared_per_block), choices[-1]
    )


def wanted_pieces(kv_heads: int, per_sm: int, gpu: Gpu) -> int:
    """Pieces of all keys of one KV head for which the machine has room at once."""
    return max(1, per_sm * gpu.num_sms // kv_heads)


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
