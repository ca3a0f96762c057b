"""Jit code of the resident expert GEMMs' work list, and of the warp group that loads. ``grouped_resident_jit`` has the
kernel, and says how the groups work together."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy as cp
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from microscale.kernels.gluon_names import async_load, reinterpret

WIDTHS: gl.constexpr = gl.constexpr(3)
"""A tile of the work list with few pairs takes half or a quarter of the columns."""

# ---- the work list --------------------------------------------------------------------------------------------------
# Loops over items must not be emptied of what does not change in them: dozens of addresses of the end would lie in
# registers all through the products, and ptxas would serialise those (C7512).


@gluon.jit
def entry_of(tiles_ptr, item, items, BLOCKS: gl.constexpr):
    """Expert, first place and number of pairs of an item; asked for while the item before is computed."""
    row = tiles_ptr + gl.minimum(item, items - 1) // BLOCKS * 4
    return gl.load(row), gl.load(row + 1), gl.load(row + 2)


@gluon.jit
def fits(count, BN: gl.constexpr, narrower: gl.constexpr):
    """Whether ``BN >> narrower`` columns are the ones for so many pairs. Each width is a condition of its own, beside
    the others: nested ones make ptxas run out of registers (C7511)."""
    if narrower == 0:
        return count > BN // 2
    elif narrower == WIDTHS - 1:
        return (count > 0) & (count <= BN >> narrower)
    else:
        return (count > BN >> (narrower + 1)) & (count <= BN >> narrower)


@gluon.jit
def part_of(x_smem, BN: gl.constexpr, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """The ring of tokens as buffers of ``COLUMNS`` of its ``BN``: every ``BN / COLUMNS``-th begins a stage."""
    return reinterpret(x_smem, x_smem.dtype, [STAGES * (BN // COLUMNS), COLUMNS, 64], x_smem.layout)


@gluon.jit
def await_tile(full, step, STAGES: gl.constexpr):
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)


@gluon.jit
def release(empty, step, STAGES: gl.constexpr):
    """Every thread says for itself that it has read a K tile. It has no copies under way, so an arrival after the last
    of them is one at once."""
    cp.mbarrier_arrive(empty.index(step % STAGES), increment_count=False)


# ---- the loading group ----------------------------------------------------------------------------------------------


@gluon.jit
def _load_tile(
    x_ptr, w_ptr, s_ptr, order_ptr, x_smem, w_ring, s_smem, full, empty, expert, block, first, count, step,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, TOP_K: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, BITS: gl.constexpr, NVFP4: gl.constexpr, FP8: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    """Copy all K tiles of one item, each as soon as its place in the ring is empty."""
    HALVES: gl.constexpr = BITS // 4  # a K tile of MXFP8 is two copies: its groups of 32 columns
    WORDS: gl.constexpr = 32 * BITS  # of a tile of 16 rows
    LX: gl.constexpr = gl.BlockedLayout([1, 16 if FP8 else 8], [8 if FP8 else 4, 4 if FP8 else 8], [4, 1], [1, 0])
    LW: gl.constexpr = gl.BlockedLayout([1, 1, 4], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    LS: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    n = gl.arange(0, COLUMNS, gl.SliceLayout(1, LX))
    place = first + gl.minimum(n, count - 1)
    rows = gl.load(order_ptr + place) // TOP_K if FIRST else place
    column = gl.arange(0, 64, gl.SliceLayout(0, LX))
    x_ptrs = x_ptr + rows.to(gl.int64)[:, None] * (KT * 64) + column[None, :]
    rg = gl.arange(0, 32, gl.SliceLayout(1, gl.SliceLayout(2, LW)))
    t = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(2, LW)))
    v = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, LW)))
    w_ptrs = ()
    for group in gl.static_range(GROUPS):
        # Row tiles past the end repeat the last one: every address is valid, and the result is not stored.
        tile = gl.minimum((block * GROUPS + group) * 4 + rg // 8, ROW_TILES - 1)
        at = (tile * (KT * WORDS) + rg % 8 * 16)[:, None, None] + t[None, :, None] * 4 + v[None, None, :]
        w_ptrs = w_ptrs + (w_ptr + expert.to(gl.int64) * (ROW_TILES * KT * WORDS) + at,)
    rs = gl.arange(0, s_smem.shape[1], LS)
    if NVFP4:
        s_tile = gl.minimum(block * (GROUPS * 4) + rs // 16, ROW_TILES - 1)
        s_ptrs = s_ptr + expert.to(gl.int64) * (ROW_TILES * (KT + 1) * 16) + (s_tile * ((KT + 1) * 16) + rs % 16)
    else:
        s_tile = gl.minimum(block * (GROUPS * 4) + rs // 8, ROW_TILES - 1)
        s_ptrs = s_ptr + expert.to(gl.int64) * (ROW_TILES * KT * 8) + (s_tile * (KT * 8) + rs % 8)
    x_ring = part_of(x_smem, BN, COLUMNS, STAGES)
    for kt in range(KT):
        stage = (step + kt) % STAGES
        mbarrier.wait(empty.index(stage), ((step + kt) // STAGES & 1) ^ 1)
        # Columns without a token are filled with zeros and read nothing from L2, which limits a batch. 256 columns have
        # no registers for the masks (16 bytes spill on SM 9.0, Triton 3.7).
        x_tile = x_ring.index(stage * (BN // COLUMNS))
        if COLUMNS > 128:
            async_load(x_tile, x_ptrs + kt * 64)
        else:
            async_load(x_tile, x_ptrs + kt * 64, (n < count)[:, None])
        for group in gl.static_range(GROUPS):
            for half in gl.static_range(HALVES):
                to = w_ring.index((stage * GROUPS + group) * HALVES + half)
                async_load(to, w_ptrs[group] + (kt * WORDS + half * 128))
        async_load(s_smem.index(stage), s_ptrs + kt * (16 if NVFP4 else 8))
        cp.mbarrier_arrive(full.index(stage), increment_count=False)


@gluon.jit
def load_items(
    x_ptr, w_ptr, s_ptr, tiles_ptr, order_ptr, items, x_smem, w_ring, s_smem, full, empty,
    KT: gl.constexpr, ROW_TILES: gl.constexpr, TOP_K: gl.constexpr, GROUPS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, BITS: gl.constexpr, NVFP4: gl.constexpr, FP8: gl.constexpr,
    FIRST: gl.constexpr,
):  # fmt: skip
    BLOCKS: gl.constexpr = (ROW_TILES + 4 * GROUPS - 1) // (4 * GROUPS)
    step = 0
    expert, first, count = entry_of(tiles_ptr, gl.program_id(0), items, BLOCKS)
    for item in tl.range(gl.program_id(0), items, gl.num_programs(0), disable_licm=True):
        later = entry_of(tiles_ptr, item + gl.num_programs(0), items, BLOCKS)
        block = item % BLOCKS
        for narrower in gl.static_range(WIDTHS):
            if fits(count, BN, narrower):
                _load_tile(
                    x_ptr, w_ptr, s_ptr, order_ptr, x_smem, w_ring, s_smem, full, empty, expert, block, first, count,
                    step, KT, ROW_TILES, TOP_K, GROUPS, BN, BN >> narrower, STAGES, BITS, NVFP4, FP8, FIRST,
                )  # fmt: skip
                step += KT
        expert, first, count = later
