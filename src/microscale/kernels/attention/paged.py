"""``triton_paged``: paged attention on any GPU with bf16 matrix units. Owns the tiles and the launches.

Two ways through the same kernel: batches in which every sequence has one new token split the keys over several programs
and merge (few sequences could not fill the machine otherwise); all others take blocks of query rows. Grids follow from
sizes that the host knows (tokens, sequences, width of the page table); lengths are read on the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from microscale.hardware import Feature, Gpu
from microscale.kernels.attention import paged_jit
from microscale.kernels.attention.cost import attention_flops, kv_bytes
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.op import Activations, Cost, Implementation, Reason, Variant

HEAD_DIMS = (64, 128, 256, 512)
MAX_GROUP = 16
MAX_SPLITS = 32
NO_WINDOW = 1 << 30
"""Wider than any context: a layer without a window sees everything."""
MMA = r"mma\.sync\S*bf16|wgmma\S*bf16|tcgen05\.mma"


@dataclass(frozen=True)
class Tile:
    """One configuration of the kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int

    def shared_bytes(self, head_dim: int, kv_size: int) -> int:
        """An upper bound: the queries, keys and values in flight, the softmax's weights and 1 KiB for reductions.

        Triton keeps ``stages - 1`` tiles in flight. E4M3 tiles are converted in registers and go through shared memory
        once more as bf16.
        """
        tile = self.block_n * head_dim
        in_flight = (self.stages - 1) * 2 * tile * kv_size + (2 * tile if kv_size == 1 else 0)
        return self.block_m * head_dim * 2 + in_flight + 2 * self.block_n * self.block_m + 1024


# Head size → tiles from most to least wanted; the first that fits the card's shared memory is taken. Blocks shrink as
# heads grow, so that accumulator, scores and one tile of values stay in 255 registers.
_PREFILL = {
    # 8192 tokens on H200, triton 3.6: 334 TFLOP/s; 128 x 64 with 4 warps 326, 64 x 128 315, 128 x 32 271.
    64: (Tile(64, 64, 4, 3),),
    128: (Tile(128, 64, 8, 3), Tile(128, 64, 8, 2)),
    256: (Tile(64, 32, 8, 2),),
    512: (Tile(32, 32, 8, 2), Tile(16, 16, 8, 2)),
}
_PREFILL_FP8 = _PREFILL | {256: (Tile(32, 32, 8, 2),)}  # 64 rows spill 248 bytes while they convert
# Without wgmma or tcgen05 the operands stand in registers too: smaller blocks, or they spill.
_PREFILL_MMA = _PREFILL | {64: (Tile(64, 32, 4, 3),), 128: (Tile(64, 32, 4, 3),)}
_PREFILL_MMA_FP8 = _PREFILL_FP8 | {64: (Tile(64, 32, 4, 3),), 128: (Tile(64, 32, 8, 2),), 512: (Tile(32, 16, 8, 2),)}
_DECODE = {
    64: (Tile(16, 128, 4, 3),),  # 8 sequences of 8192 on H200: 44 µs, the best of seven shapes (the worst: 80)
    128: (Tile(16, 64, 4, 3),),
    256: (Tile(16, 32, 4, 3), Tile(16, 32, 4, 2)),
    512: (Tile(16, 32, 8, 3), Tile(16, 16, 8, 3)),
}
_DECODE_FP8 = _DECODE | {64: (Tile(16, 64, 8, 3),)}


def _operands_in_shared_memory(gpu: Gpu) -> bool:
    """Whether large products read their operands from shared memory, and not from registers."""
    return gpu.has(Feature.WGMMA) or gpu.has(Feature.TCGEN05)


def compile_options(tile: Tile, gpu: Gpu) -> dict[str, int]:
    """Options of a launch. Left alone, ptxas may stop at 128 registers and spill (8 bytes, decode of 512, SM120)."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return options if _operands_in_shared_memory(gpu) else options | {"maxnreg": 255}


def choose_tile(decode: bool, head_dim: int, fp8: bool, gpu: Gpu) -> Tile:
    """The best tile whose shared memory fits; the last one fits every card."""
    if decode:
        tiles = _DECODE_FP8 if fp8 else _DECODE
    elif _operands_in_shared_memory(gpu):
        tiles = _PREFILL_FP8 if fp8 else _PREFILL
    else:
        tiles = _PREFILL_MMA_FP8 if fp8 else _PREFILL_MMA
    size = 1 if fp8 else 2
    choices = tiles[head_dim]
    return next((tile for tile in choices if tile.shared_bytes(head_dim, size) <= gpu.shared_per_block), choices[-1])


def choose_splits(sequences: int, kv_heads: int, max_keys: int, block_n: int, gpu: Gpu) -> int:
    """Enough programs for four per SM (8 x 8192 on H200: 44 µs against 46 with two), with a block of keys each."""
    wanted = -(-4 * gpu.num_sms // (sequences * kv_heads))
    return max(1, min(wanted, MAX_SPLITS, max_keys // block_n))


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
        tokens, heads, head_dim = q.shape
        out = torch.empty((tokens, heads, head_dim), dtype=q.dtype, device=q.device)
        sequences = batch.context_lens.shape[0]
        if tokens == 0:
            return out
        fp8 = kv.k.dtype == torch.uint8
        decode = batch.max_query_len == 1
        tile = choose_tile(decode, head_dim, fp8, gpu)
        group = heads // spec.num_kv_heads
        blocks = sequences if decode else tokens // (tile.block_m // group) + sequences
        max_keys = batch.page_table.shape[1] * kv.page_size
        if spec.window is not None:
            max_keys = min(max_keys, spec.window)
        splits = choose_splits(sequences, spec.num_kv_heads, max_keys, tile.block_n, gpu) if decode else 1
        rows = tokens * heads * splits if splits > 1 else 0
        partial = torch.empty((rows, head_dim), dtype=torch.float32, device=q.device)
        summary = torch.empty((rows, 2), dtype=torch.float32, device=q.device)
        if sinks is None:
            sinks = torch.full((heads,), -math.inf, dtype=torch.float32, device=q.device)
        paged_jit.paged_attention[(blocks, spec.num_kv_heads, splits)](
            q, kv.k, kv.v, sinks, out, partial, summary,
            batch.query_start, batch.context_lens, batch.page_table,
            q if kv.k_scale is None else kv.k_scale, q if kv.v_scale is None else kv.v_scale,
            sequences, spec.window or NO_WINDOW, kv.page_size.bit_length() - 1, group, splits, head_dim**-0.5,
            q.stride(0), out.stride(0), kv.k.stride(0), kv.k.stride(1), batch.page_table.stride(0),
            HEAD_DIM=head_dim, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, KV_FP8=fp8, DECODE=decode, SPLIT=splits > 1,
            PLAIN=triton.knobs.runtime.interpret,
            **compile_options(tile, gpu),
        )  # fmt: skip
        if splits > 1:
            paged_jit.merge_splits[(tokens, heads)](
                partial,
                summary,
                out,
                splits,
                out.stride(0),
                HEAD_DIM=head_dim,
                MAX_SPLITS=MAX_SPLITS,
                PLAIN=triton.knobs.runtime.interpret,
                num_warps=4,
            )
        return out

    def variants(self, gpu: Gpu) -> Iterator[Variant]:
        for head_dim in HEAD_DIMS:
            for fp8 in (False, True):
                for decode, split in ((True, True), (True, False), (False, False)):
                    yield _attention_variant(head_dim, fp8, decode, split, gpu)
            yield Variant(
                op=self.op,
                implementation=self.name,
                name=f"merge_d{head_dim}",
                fn=paged_jit.merge_splits,
                signature={
                    "partial_ptr": "*fp32",
                    "summary_ptr": "*fp32",
                    "out_ptr": "*bf16",
                    "num_splits": "i32",
                    "stride_out_token": "i32",
                },
                constants={"HEAD_DIM": head_dim, "MAX_SPLITS": MAX_SPLITS, "PLAIN": False},
                options={"num_warps": 4},
                divisible=("partial_ptr", "summary_ptr", "out_ptr", "stride_out_token"),
            )


def _attention_variant(head_dim: int, fp8: bool, decode: bool, split: bool, gpu: Gpu) -> Variant:
    tile = choose_tile(decode, head_dim, fp8, gpu)
    kv = "*u8" if fp8 else "*bf16"
    scale = "*fp32" if fp8 else "*bf16"
    pointers = {
        "q_ptr": "*bf16", "k_ptr": kv, "v_ptr": kv, "sinks_ptr": "*bf16", "out_ptr": "*bf16", "partial_ptr": "*fp32",
        "summary_ptr": "*fp32", "query_start_ptr": "*i32", "context_lens_ptr": "*i32", "page_table_ptr": "*i32",
        "k_scale_ptr": scale, "v_scale_ptr": scale,
    }  # fmt: skip
    strides = ("stride_q_token", "stride_out_token", "stride_page", "stride_kv_head", "stride_table")
    numbers = ("num_sequences", "window", "page_shift", "group", "num_splits")
    return Variant(
        op="attention",
        implementation=PagedAttention.name,
        name=f"{'decode' if decode else 'prefill'}_d{head_dim}_{'fp8' if fp8 else 'bf16'}{'_split' if split else ''}",
        fn=paged_jit.paged_attention,
        signature=pointers | dict.fromkeys(numbers, "i32") | {"scale": "fp32"} | dict.fromkeys(strides, "i32"),
        constants={
            "HEAD_DIM": head_dim, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "KV_FP8": fp8, "DECODE": decode,
            "SPLIT": split, "PLAIN": False,
        },
        options=compile_options(tile, gpu),
        divisible=(*pointers, *strides[:-1]),
        promise=MMA,
    )  # fmt: skip
