"""The tiles of ``triton_paged``: which card runs which heads in which blocks, and into how many splits keys are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from microscale.hardware import Feature, Gpu

HEAD_DIMS = (64, 128, 256, 512)
# Head size → splits that an SM works on at once, by its registers.
SPLITS_PER_SM = {64: 4, 128: 3, 256: 3, 512: 1}
# Head size → keys in a split, at least: less is not worth a merge. Gemma 4 on H200, one token at a context of 160, 30
# layers: 1579 µs with 32 keys of 256, 1663 with 64, 1692 with 128; at 1000 no difference.
LEAST_KEYS = {64: 256, 128: 128, 256: 32, 512: 64}
# Head size → splits of a sequence up to which the last program adds them up. The width of the page table or the window
# bounds them; a window of 1024 is 33 splits of 32 keys. Gemma 4's sliding layers have two rows of 256 in a split, 2 KB;
# its full layers have eight of 512, 16 KB. gpt-oss has eight of 64, 2 KB, and tables of 2048 keys are eight splits.
INSIDE_SPLITS = {64: 8, 128: 0, 256: 40, 512: 0}
# Head size → sequences up to which decoding steps take their heads straight from the projection, in one launch. Its
# kernel needs more registers, and with many programs an SM holds fewer of them (H200, 24 layers of gpt-oss-20b: one
# sequence 1118 us and 1149 apart, 8 sequences the same, 64 of 576 tokens 6201 and 6076; 30 of Gemma 4: 64 of 576 tokens
# 10,648 and 10,857).
FUSED_SEQUENCES = {64: 8, 128: 8, 256: 64, 512: 64}


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
    """Keys of a split that go to L2 while the kernel before runs, where the GPU can do that (decode)."""
    early: int = 0
    """1: the keys of a split's first block, 2: and its values come to registers while the kernel before runs
    (``attend_fused``); then ``prefetch`` counts from the second block on."""

    def least_blocks(self, head_dim: int) -> int:
        """Blocks of keys in a split, at least."""
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
    # Left alone, ptxas stops at 168 or 128 registers on SM 10.x and spills (Triton 3.6). 64 keys of 512 spill on SM 8.
    256: (Tile(16, 32, 4, 3, 255), Tile(16, 32, 4, 2, 255)),
    512: (Tile(16, 32, 8, 3, 255), Tile(16, 16, 8, 3, 255)),
}
# The first keys are on their way before the queries are: at short contexts attention is nothing but latency.
_DECODE_WGMMA = _DECODE | {
    256: (Tile(16, 32, 4, 3, 168, prefetch=32),),
    # 8 sequences of 8192: 85 µs; 16 x 32 107.
    512: (Tile(16, 64, 8, 3, 255, prefetch=64),),
}
# With 168 registers they spill 8 bytes on SM 12.x (Triton 3.6) and 36 on SM 10.x.
_DECODE_FP8 = _DECODE | {64: (Tile(16, 128, 4, 3, 255),)}
# 8 sequences of 8192 on H200: 34 µs, four programs an SM; with 168 registers three, 45; 16 x 64 37 to 49.
_DECODE_FP8_WGMMA = _DECODE_FP8 | {
    64: (Tile(16, 128, 4, 3, 128),),
    256: (Tile(16, 32, 4, 3),),
    512: (Tile(16, 32, 8, 3, 255),),  # left alone, ptxas stops at 128 and spills 8 bytes (Triton 3.6)
}

# With the newest heads' tile, and a first block of keys and values, in registers too.
_FUSED: dict[int, tuple[Tile, ...]] = {
    64: (Tile(16, 128, 4, 3, 255, prefetch=128, early=2),),
    128: (Tile(16, 64, 4, 3, 255, prefetch=64, early=2),),
    256: (Tile(16, 32, 4, 3, 255, prefetch=32, early=2),),
    512: (Tile(16, 16, 8, 3, 255, prefetch=64, early=2),),
}
_FUSED_FP8 = _FUSED | {512: (Tile(16, 32, 8, 3, 255, prefetch=64),)}
_FUSED_64 = {64: (Tile(16, 128, 4, 3, 168, early=2),)}
# H200, one token of Gemma 4 at a context of 192, 30 layers: 256 without a block in registers 1499 us, with 1530; 512
# in blocks of 16 with one 1496, of 32 without 1530 (16 x 32 with one spills 16 bytes).
_FUSED_WGMMA = _FUSED | _FUSED_64 | {256: (Tile(16, 32, 4, 3, 255, prefetch=32),)}
_FUSED_FP8_WGMMA = _FUSED_FP8 | _FUSED_64


def _operands_in_shared_memory(gpu: Gpu) -> bool:
    """Whether large products read their operands from shared memory, and not from registers."""
    return gpu.has(Feature.WGMMA) or gpu.has(Feature.TCGEN05)


def compile_options(tile: Tile, gpu: Gpu) -> dict[str, Any]:
    """Options of a launch. Left alone, ptxas may stop at 128 registers and spill (8 bytes, decode of 512, SM120)."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.registers is not None:
        return options | {"maxnreg": tile.registers}
    return options if _operands_in_shared_memory(gpu) else options | {"maxnreg": 255}


def spills_because(tile: Tile, head_dim: int) -> str | None:
    """Why a tile for long queries may spill."""
    if head_dim == 512 and tile.block_m == 64:
        return "64 rows of 512 fill the registers; 32 rows need none of it and reach 82 TFLOP/s and not 171 on H200"
    if head_dim == 256 and tile.block_m * tile.block_n == 128 * 64:
        return "128 x 64 of 256 fill the registers; 128 x 32 need none of it and reach 248 TFLOP/s and not 318 on H200"
    if head_dim == 64 and tile.registers == 168:
        return "one word, before and after the loops (Triton 3.7); with a program less on an SM 316 TFLOP/s and not 375"
    return None


def _decode_tiles(fp8: bool, gpu: Gpu) -> dict[int, tuple[Tile, ...]]:
    if gpu.has(Feature.WGMMA):
        return _DECODE_FP8_WGMMA if fp8 else _DECODE_WGMMA
    return _DECODE_FP8 if fp8 else _DECODE


def choose_tile(
    decode: bool, head_dim: int, fp8: bool, gpu: Gpu, *, window: bool = False, heads_too: bool = False
) -> Tile:
    """The best tile whose shared memory fits; the last one fits every card. ``heads_too``: for ``attend_fused``."""
    if heads_too:
        tiles = ((_FUSED_WGMMA, _FUSED_FP8_WGMMA) if gpu.has(Feature.WGMMA) else (_FUSED, _FUSED_FP8))[fp8]
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


def wanted_splits(kv_heads: int, per_sm: int, gpu: Gpu) -> int:
    """Splits of all keys of one KV head for which the machine has room at once."""
    return max(1, per_sm * gpu.num_sms // kv_heads)
