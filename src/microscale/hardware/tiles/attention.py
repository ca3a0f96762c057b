"""Tiles of paged attention: which card runs which heads in which blocks, and how the keys of a sequence are split."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import product

from microscale.hardware.cards import Family, Feature, Gpu
from microscale.hardware.tiles.tuned import Kernels, Section, measured

HEAD_DIMS = (64, 128, 256, 512)
MAX_REGISTERS = 255
FEWEST_ROWS = 16
"""Of a matrix instruction."""
VERIFY_HEAD_DIM = 64
"""Heads that verify drafts straight from the projection; with wider ones it is slower (H200, Triton 3.6)."""
VERIFY_ROWS = 32
"""Query rows of a sequence and a KV head, new tokens times query heads, up to which that pays: programs of
``FEWEST_ROWS`` share them."""
MANY_PROGRAMS = 7
"""Programs (sequences times KV heads) for each SM from which few sequences are split, so that starting and finishing a
program matters (``AttentionWork.DECODE_MANY``). Measured for heads of 64 on an H200; 3.9 are too few."""
VERIFY_SEQUENCES = 2
"""Up to which drafts are verified straight from the projection. On an H200 four sequences gain 34 us of 24 layers at a
context of 128, 3 at 2048, and lose 113 at 8192; a graph does not know the context."""


class AttentionWork(StrEnum):
    """The kinds of attention that have tiles of their own."""

    PREFILL = "prefill"
    PREFILL_WINDOW = "prefill_window"
    """With a sliding window: most blocks of keys are masked in part."""
    DECODE = "decode"
    """Split-KV: one new token in a sequence, or two."""
    DECODE_MANY = "decode_many"
    """The same with so many sequences that few are split: ``MANY_PROGRAMS``. As ``DECODE`` unless measured."""
    DECODE_32 = "decode_32"
    """The same with 32 query rows: drafts are verified."""
    DECODE_64 = "decode_64"
    FUSED_DECODE = "fused_decode"
    """Decode with the norms and rotation of the new heads and the KV write in the same launch."""
    FUSED_VERIFY = "fused_verify"
    """The same for two or more new tokens of a sequence, which programs share: drafts are verified, with keys of
    ``VERIFY_HEAD_DIM`` in bf16."""

    @property
    def rows(self) -> int:
        """Query rows of a block, in decode: tokens times query heads of a KV head."""
        return {AttentionWork.DECODE_32: 32, AttentionWork.DECODE_64: 64}.get(self, FEWEST_ROWS)

    @property
    def fused(self) -> bool:
        """Straight from the projection."""
        return self in (AttentionWork.FUSED_DECODE, AttentionWork.FUSED_VERIFY)

    @property
    def decodes(self) -> bool:
        return self not in (AttentionWork.PREFILL, AttentionWork.PREFILL_WINDOW)


class Kv(StrEnum):
    """How keys and values are stored."""

    BF16 = "bf16"
    FP8 = "fp8"

    @classmethod
    def of(cls, fp8: bool) -> Kv:
        return cls.FP8 if fp8 else cls.BF16

    @property
    def bytes(self) -> int:
        return 1 if self is Kv.FP8 else 2


@dataclass(frozen=True)
class AttentionCase:
    """What a tile was measured for."""

    work: AttentionWork
    head_dim: int
    kv: Kv


@dataclass(frozen=True)
class AttentionTile:
    """One configuration of the kernel."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    """The most registers a thread may have; without it, what ptxas takes."""
    prefetch: int = 0
    """Keys of a split that go to L2 while the kernel before runs, where the GPU can do that (decode)."""
    early: int = 0
    """1: the keys of a split's first block, 2: and its values come to registers while the kernel before runs (fused
    decode, and always 2 in fused verify); then ``prefetch`` counts from the second block on."""

    def shared_bytes(self, case: AttentionCase) -> int:
        """An upper bound: the queries, keys and values in flight, the softmax's weights and 4 KiB for reductions.

        Triton keeps ``stages - 1`` tiles in flight, and one fewer in decode, where the pages' numbers take a stage.
        E4M3 tiles are converted in registers and go through shared memory once more as bf16.
        """
        decode, size = case.work.decodes, case.kv.bytes
        tile = self.block_n * case.head_dim
        in_flight = max(1, self.stages - (2 if decode else 1)) * 2 * tile * size + (2 * tile if size == 1 else 0)
        queries = self.block_m * case.head_dim * 2
        return queries + in_flight + 2 * self.block_n * self.block_m + (4096 if decode else 1024)


def _misfit(case: AttentionCase, tile: AttentionTile, family: Family) -> str | None:
    shared = tile.shared_bytes(case)
    if case.head_dim not in HEAD_DIMS:
        return f"is for heads of {case.head_dim}; there are kernels for {', '.join(map(str, HEAD_DIMS))}"
    if case.work.decodes and tile.block_m > case.work.rows:
        return f"has {tile.block_m} query rows, and {case.work} has up to {case.work.rows}"
    if reason := _does_not_pay(case):
        return reason
    if case.work is AttentionWork.FUSED_VERIFY and tile.early != 2:
        return f"has early {tile.early}, and {case.work} has keys and values of a first block early"
    if shared > family.shared_per_block:
        return f"needs {shared} bytes of shared memory, family {family.name} offers {family.shared_per_block}"
    return None


SECTION = Section(Kernels.ATTENTION, AttentionCase, AttentionTile, _misfit)

_T = AttentionTile
_Tiles = dict[int, tuple[AttentionTile, ...]]
# The rule. Head size → tiles from most to least wanted; the first that fits the card's shared memory is taken, and the
# last fits every card. Blocks shrink as heads grow, so that accumulator, scores and one tile of values stay in 255
# registers.
_PREFILL: _Tiles = {
    # 8192 tokens on H200, triton 3.6: 334 TFLOP/s; 128 x 64 with 4 warps 326, 64 x 128 315, 128 x 32 271.
    64: (_T(64, 64, 4, 3),),
    128: (_T(128, 64, 8, 3), _T(128, 64, 8, 2)),
    256: (_T(64, 32, 8, 2),),
    # 4096 tokens on H200: 171 TFLOP/s; 32 x 32 82, 64 x 16 105.
    512: (_T(64, 32, 8, 2), _T(32, 32, 8, 2), _T(16, 16, 8, 2)),
}
# 64 rows of 256 spill 248 bytes while they convert.
_PREFILL_FP8 = _PREFILL | {256: (_T(32, 32, 8, 2, 255),), 512: (_T(32, 32, 8, 2), _T(16, 16, 8, 2))}
# Without wgmma or tcgen05 the operands are in registers too: smaller blocks, or they spill.
_PREFILL_MMA = _PREFILL_FP8 | {64: (_T(64, 32, 4, 3),), 128: (_T(64, 32, 4, 3),), 256: _PREFILL[256]}
# 32 rows of 512 in FP8 spill 216 bytes on SM 8.0 (Triton 3.7).
_PREFILL_MMA_FP8 = _PREFILL_FP8 | {64: (_T(64, 32, 4, 3),), 128: (_T(64, 32, 8, 2),), 512: (_T(16, 32, 8, 2),)}
_DECODE: _Tiles = {
    64: (_T(16, 128, 4, 3),),
    128: (_T(16, 64, 4, 3),),
    # Left alone, ptxas stops at 168 or 128 registers on SM 10.x and spills (Triton 3.6). 64 keys of 512 spill on SM 8.
    256: (_T(16, 32, 4, 3, 255), _T(16, 32, 4, 2, 255)),
    512: (_T(16, 32, 8, 3, 255), _T(16, 16, 8, 3, 255)),
}
# With 168 registers they spill 8 bytes on SM 12.x (Triton 3.6) and 36 on SM 10.x.
_DECODE_FP8 = _DECODE | {64: (_T(16, 128, 4, 3, 255),)}
# More query rows, and as much less of the keys: accumulator, scores and a tile of values stay in the registers.
_DECODE_32: _Tiles = {
    # Left alone, ptxas spills 20 bytes on SM 10.0 (Triton 3.7).
    64: (_T(32, 128, 4, 3, 255),),
    128: (_T(32, 64, 4, 3),),
    256: (_T(32, 32, 4, 3, 255), _T(32, 32, 4, 2, 255)),
    512: (_T(32, 16, 8, 3, 255),),
}
_DECODE_32_FP8 = _DECODE_32 | {64: (_T(32, 64, 4, 3, 255),), 256: (_T(32, 32, 8, 3, 255), _T(32, 32, 8, 2, 255))}
# 32 rows of 512 spill 168 bytes on SM 8.0 (Triton 3.7): drafts of more tokens than 16 rows hold run as prompts do.
_DECODE_32_MMA_FP8 = _DECODE_32_FP8 | {512: _DECODE[512]}
_DECODE_64: _Tiles = {
    64: (_T(64, 64, 4, 3),),
    128: (_T(64, 64, 8, 3, 255),),
    256: (_T(64, 32, 8, 3, 255), _T(64, 32, 8, 2, 255)),
}
_DECODE_64_FP8 = _DECODE_64 | {64: (_T(64, 64, 4, 3, 255),), 128: (_T(64, 32, 8, 3, 255),)}
# With the newest heads' tile, and a first block of keys and values, in registers too.
_FUSED: _Tiles = {
    64: (_T(16, 128, 4, 3, 255, prefetch=128, early=2),),
    128: (_T(16, 64, 4, 3, 255, prefetch=64, early=2),),
    256: (_T(16, 32, 4, 3, 255, prefetch=32, early=2),),
    512: (_T(16, 16, 8, 3, 255, prefetch=64, early=2),),
}
_FUSED_FP8 = _FUSED | {512: (_T(16, 32, 8, 3, 255, prefetch=64),)}
# QKV and attention of gpt-oss-20b, one sequence of two tokens at 2048 on H200, triton 3.6: 379 us; with 4 warps
# and 3 stages 404.
_VERIFY: _Tiles = {VERIFY_HEAD_DIM: (_T(16, 128, 8, 2, 255, prefetch=128, early=2),)}


def cases() -> Iterator[AttentionCase]:
    """Everything that has a tile: each work with each head size and KV format, as far as it is asked for."""
    for work, head_dim, kv in product(AttentionWork, HEAD_DIMS, Kv):
        case = AttentionCase(work, head_dim, kv)
        if _does_not_pay(case) is None and (
            work is not AttentionWork.DECODE_64 or drafted_work(work.rows, head_dim) is work
        ):
            yield case


def drafted_work(rows: int, head_dim: int) -> AttentionWork:
    """The narrowest decode whose block has this many query rows, or the widest that there is: 64 rows of 512 spill 3 KB
    of registers with FP8 keys (SM90, Triton 3.7)."""
    widest = AttentionWork.DECODE_32 if head_dim == HEAD_DIMS[-1] else AttentionWork.DECODE_64
    return next((work for work in (AttentionWork.DECODE, AttentionWork.DECODE_32) if rows <= work.rows), widest)


def decode_work(programs: int, gpu: Gpu) -> AttentionWork:
    """The decode of so many sequences times KV heads."""
    return AttentionWork.DECODE_MANY if programs >= MANY_PROGRAMS * gpu.num_sms else AttentionWork.DECODE


def no_kernel(case: AttentionCase, gpu: Gpu) -> str | None:
    """Why a card does not run a case, in one clause; ``None`` where it does."""
    if case.work.fused and not gpu.has(Feature.PDL):
        return f"needs programmatic dependent launch, which {gpu.name} does not have"
    return _does_not_pay(case)


def _does_not_pay(case: AttentionCase) -> str | None:
    if case.work is not AttentionWork.FUSED_VERIFY or (case.head_dim, case.kv) == (VERIFY_HEAD_DIM, Kv.BF16):
        return None
    return f"pays with bf16 KV and heads of {VERIFY_HEAD_DIM}, not {case.kv} KV and heads of {case.head_dim}"


def choose(case: AttentionCase, gpu: Gpu) -> AttentionTile:
    """The tile that was measured on the card's family, or else the rule's."""
    rows = measured(SECTION, gpu.family)
    if case.work is AttentionWork.DECODE_MANY and case not in rows:
        case = replace(case, work=AttentionWork.DECODE)
    return rows[case].tile if case in rows else by_rule(case, gpu.family)


@cache
def by_rule(case: AttentionCase, family: Family) -> AttentionTile:
    """The best tile whose shared memory fits."""
    choices = _rule(case, family)[case.head_dim]
    fits = (tile for tile in choices if tile.shared_bytes(case) <= family.shared_per_block)
    tile = next(fits, choices[-1])
    # Left alone, ptxas may stop at 128 registers and spill (8 bytes, decode of 512, SM120).
    limited = tile.registers is not None or _operands_in_shared_memory(family)
    return tile if limited else replace(tile, registers=MAX_REGISTERS)


def _rule(case: AttentionCase, family: Family) -> _Tiles:
    fp8 = case.kv is Kv.FP8
    if case.work is AttentionWork.FUSED_DECODE:
        return _FUSED_FP8 if fp8 else _FUSED
    if case.work is AttentionWork.FUSED_VERIFY:
        return _VERIFY
    if case.work in (AttentionWork.DECODE, AttentionWork.DECODE_MANY):
        return _DECODE_FP8 if fp8 else _DECODE
    if case.work is AttentionWork.DECODE_32 and fp8:
        return _DECODE_32_FP8 if _operands_in_shared_memory(family) else _DECODE_32_MMA_FP8
    if case.work is AttentionWork.DECODE_32:
        return _DECODE_32
    if case.work is AttentionWork.DECODE_64:
        return _DECODE_64_FP8 if fp8 else _DECODE_64
    if _operands_in_shared_memory(family):
        return _PREFILL_FP8 if fp8 else _PREFILL
    return _PREFILL_MMA_FP8 if fp8 else _PREFILL_MMA


def _operands_in_shared_memory(family: Family) -> bool:
    """Whether large products read their operands from shared memory, and not from registers."""
    return not family.features.isdisjoint({Feature.WGMMA, Feature.TCGEN05})


WIDEN_BYTES = 512 << 20
"""Most bytes of a prompt's keys and values in bf16 where the cache is in FP8 (``kernels/attention/widen.py``): those of
one sequence of 131072 positions in the full layers of gpt-oss (twice over) and of Gemma 4."""


# ---- split-KV -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    head_dim: int
    kv: Kv


@dataclass(frozen=True)
class SplitKv:
    """How the keys of a short query are split among programs."""

    splits_per_sm: int
    """Splits that an SM works on at once, by its registers."""
    least_keys: int
    """Keys in a split, at least: less is not worth a merge."""
    merged_inside: int
    """Splits of a sequence up to which the last program adds them up."""
    fused_sequences: int
    """Sequences up to which decode takes its heads straight from the projection: that kernel needs more registers, and
    with many programs an SM holds fewer of them."""

    def least_blocks(self, tile: AttentionTile) -> int:
        """Blocks of keys in a split, at least."""
        return max(1, self.least_keys // tile.block_n)


def _split_misfit(key: Heads, tile: SplitKv, family: Family) -> str | None:
    if key.head_dim not in HEAD_DIMS:
        return f"is for heads of {key.head_dim}; there are kernels for {', '.join(map(str, HEAD_DIMS))}"
    if min(tile.splits_per_sm, tile.least_keys) < 1 or min(tile.merged_inside, tile.fused_sequences) < 0:
        return "has a figure that is too small"
    return None


SPLIT_SECTION = Section(Kernels.SPLIT_KV, Heads, SplitKv, _split_misfit)

# The rule, as measured on SM90: what ``merged_inside`` allows is at most 40 times 2 KB, or 16 KB once.
_SPLITS = {
    64: SplitKv(4, 256, 8, 8),
    128: SplitKv(3, 128, 0, 8),
    256: SplitKv(3, 32, 40, 64),
    512: SplitKv(1, 64, 0, 64),
}


def split_kv(head_dim: int, gpu: Gpu, kv: Kv = Kv.BF16) -> SplitKv:
    """What was measured with such keys, or else with bf16, or else the rule's."""
    rows = measured(SPLIT_SECTION, gpu.family)
    row = rows.get(Heads(head_dim, kv)) or rows.get(Heads(head_dim, Kv.BF16))
    return _SPLITS[head_dim] if row is None else row.tile


EVERY = 1 << 16
"""More splits of a sequence, and more sequences, than any batch has."""


def wanted_splits(kv_heads: int, per_sm: int, gpu: Gpu) -> int:
    """Splits of all keys of one KV head for which the machine has room at once."""
    return max(1, per_sm * gpu.num_sms // kv_heads)
