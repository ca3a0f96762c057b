"""Jit code that writes down which tile each program of the small-batch experts finds."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from microscale.kernels.moe.own_tile_jit import own_pairs, own_tile, tokens_to_read
from microscale.kernels.small_batch_core_jit import token_layout


@gluon.jit(do_not_specialize=["tokens"])
def tiles_of(
    ids_ptr,
    out_ptr,
    tokens,
    TOP_K: gl.constexpr,
    EXPERT_WORDS: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Each program's expert, the pair of each column or -1, and the token that each column reads, to its row of 17."""
    entry = gl.program_id(0)
    expert, slots = own_tile(ids_ptr, entry, tokens, TOP_K, EXPERT_WORDS, WARPS)
    n = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, token_layout(1, WARPS))))
    pair, mine = own_pairs(n, slots, TOP_K)
    gl.store(out_ptr + entry * 17, expert)
    gl.store(out_ptr + entry * 17 + 1 + n, gl.where(mine, pair, -1))
    gl.store(out_ptr + entry * 17 + 9 + n, tokens_to_read(n, slots))
