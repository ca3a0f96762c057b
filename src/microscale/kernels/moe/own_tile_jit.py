"""Jit code by which a program of the small-batch expert GEMMs finds its tile from the router's choice, without a list.

With at most 8 tokens, which name an expert once each, an expert has one tile: column ``n`` of it is token ``n``. So a
program needs the ``entry``-th of the experts that were chosen, and by which tokens. The lanes of every warp hold all
ids, and each reduction is over one warp: no shared memory, no barrier.

In which slot a token chose the expert is one word: 4 bits for each token, the slot plus 1, or 0 where it did not.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def lane_layout(size, warps):
    """``size`` numbers over the lanes of a warp; all warps hold the same."""
    return gl.SliceLayout(1, gl.BlockedLayout([size // 32, 1], [32, 1], [1, warps], [1, 0]))


@gluon.constexpr_function
def slots_of(top_k):
    """Ids of a token with those that fill up: 8 tokens have one for each lane at least."""
    slots = 4
    while slots < top_k:
        slots *= 2
    return slots


@gluon.jit
def _ones(x):
    """Bits that are set."""
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def opaque(x):
    """``x``, of which the compiler knows no more than its register. Without it what follows from a row or a tile is
    computed before the walk along K, and held in registers that the walk has not got (a word spilled, SM 8.0)."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def own_tile(
    ids_ptr, entry, tokens, TOP_K: gl.constexpr, EXPERT_WORDS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """The ``entry``-th of the experts in ``ids [tokens, TOP_K]`` by number, or -1, and the slots of the tokens."""
    SLOTS: gl.constexpr = slots_of(TOP_K)
    i = gl.arange(0, 8 * SLOTS, lane_layout(8 * SLOTS, WARPS))
    token = i // SLOTS
    slot = i % SLOTS
    real = token < tokens
    if SLOTS != TOP_K:
        real = real & (slot < TOP_K)
    ids = gl.load(ids_ptr + token * TOP_K + slot, mask=real, other=-1)
    # The experts as a set of bits: find the word with the entry-th, then the bit in it, a lane for each.
    group = ids >> 5
    bit = 1 << (ids & 31)
    word = 0
    base = 0
    rank = entry
    left = entry
    for w in gl.static_range(EXPERT_WORDS):
        found = gl.reduce_or(gl.where(group == w, bit, 0), 0)
        count = _ones(found)
        here = (left >= 0) & (left < count)
        word = gl.where(here, found, word)
        base = gl.where(here, 32 * w, base)
        rank = gl.where(here, left, rank)
        left -= count
    lane = gl.arange(0, 32, lane_layout(32, WARPS))
    hit = ((word >> lane) & 1 != 0) & (_ones(word & ((1 << lane) - 1)) == rank)
    expert = gl.max(gl.where(hit, base + lane, -1), 0)
    slots = gl.reduce_or(gl.where(ids == expert, (slot + 1) << (4 * token), 0), 0)
    return expert, slots


@gluon.jit
def own_pairs(n, slots, TOP_K: gl.constexpr):
    """The pair of each token ``n``, and whether it chose the expert."""
    place = (slots >> (4 * n)) & 15
    return n * TOP_K + place - 1, place != 0


@gluon.jit
def tokens_to_read(n, slots):
    """Token ``n`` where it chose the expert, else the first that did: every address is valid, and few are read."""
    return gl.where((slots >> (4 * n)) & 15 != 0, n, _ones((slots & -slots) - 1) >> 2)
