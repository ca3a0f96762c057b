"""Jit code of ``triton_sampling``: the cut of top-k and top-p without a sort, and the likeliest tokens.

The cut is the rank of the last token that is kept. ``narrow`` counts, at ``LEVELS`` thresholds between the maximum and
the logit below which every weight is 0, how many tokens and how much weight lie at or above each. That leaves a range
between two levels, and two numbers for what is above it; a further round divides the range again, up to three in all,
unless it holds few enough tokens already. ``collect`` lists the tokens in the range; ``settle``, one program a row,
halves the list until one token is left. Everything that is added up is an integer: exact, in any order.

    rank →   top ........ kept for certain ........ [ range: listed ] ........ out for certain ........
                                              origin                floor
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

from microscale.kernels.sampling.draw_jit import (
    NEVER,
    is_finite,
    load_block,
    rank,
    row_max,
    share_of,
    steepness,
    weight_of,
)

# exp(-25) is below 2**-36: a token that far down, in units of the temperature, weighs nothing.
SPAN: tl.constexpr = tl.constexpr(25.0)
TURNS: tl.constexpr = tl.constexpr(3)
# Count and weight of a block in one number: at most 2**12 tokens of at most 2**36 each.
COUNT_SHIFT: tl.constexpr = tl.constexpr(50)
COUNT_ONE: tl.constexpr = tl.constexpr(1 << 50)
WEIGHT_MASK: tl.constexpr = tl.constexpr((1 << 50) - 1)
HIGHEST: tl.constexpr = tl.constexpr(2**63 - 1)


@triton.jit
def _share(p, mass):
    """The least whole weight that is at least ``p`` of ``mass``."""
    return tl.ceil(p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64)


@triton.jit
def _edge(origin, floor, level, TURN: tl.constexpr, LEVELS: tl.constexpr):
    """The threshold of a level: evenly spaced, the last one exactly ``floor``."""
    # Few cuts lie in the lower half of the first range, where a token has less than exp(-12) of the largest weight.
    part: tl.constexpr = (0.5 if TURN == 0 else 1.0) / LEVELS
    inner = origin - (origin - floor) * ((level + 1).to(tl.float32) * part)
    return tl.where(level == LEVELS - 1, floor, inner)


@triton.jit
def _bracket(counts, masses, total, top_k, top_p, vocab, LEVELS: tl.constexpr):
    """From what lies above each level: is anything cut by k, and between which two levels is the cut.

    All at or above level ``high`` (-1: none) is kept and does not suffice; all that is kept is at or above ``low``.
    """
    level = tl.arange(0, LEVELS)
    at_k = tl.min(tl.where(counts >= top_k, level, LEVELS), axis=0)
    by_k = (top_k > 0) & (top_k < vocab) & (at_k < LEVELS)
    # The weight of the k largest is not known yet; it lies between those of two levels.
    least = tl.where(by_k, tl.sum(tl.where(level == at_k - 1, masses, 0), axis=0), total)
    most = tl.where(by_k, tl.sum(tl.where(level == at_k, masses, 0), axis=0), total)
    below = tl.max(tl.where(masses < _share(top_p, least), level, -1), axis=0)
    enough = tl.min(tl.where(masses >= _share(top_p, most), level, LEVELS - 1), axis=0)
    high = tl.where(top_p < 1, below, at_k - 1)
    return by_k, high, tl.where(by_k, at_k, enough)


@triton.jit
def _range(
    tables_ptr, row, top, temperature, top_k, top_p, vocab,
    ROUNDS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """What is known after ROUNDS rounds: origin and floor of the range, whether tokens above the origin are in it too
    (it is then the maximum), count and weight of those above it, the row's weight, whether k cuts, and whether so few
    are in the range that further rounds did not run."""
    origin = top
    floor = top - SPAN * temperature
    is_open = top == top
    by_k = top == top
    few = top != top
    count = tl.zeros([], tl.int64)
    mass = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    level = tl.arange(0, LEVELS)
    for turn in tl.static_range(ROUNDS):
        if few == 0:
            table = tables_ptr + (row * TURNS + turn) * 2 * LEVELS + level
            counts, masses = tl.load(table), tl.load(table + LEVELS)
            if turn == 0:
                total = tl.max(masses, axis=0)
            by_k, high, low = _bracket(counts, masses, total, top_k, top_p, vocab, LEVELS)
            moved = high >= 0
            count = tl.where(moved, tl.sum(tl.where(level == high, counts, 0), axis=0), count)
            mass = tl.where(moved, tl.sum(tl.where(level == high, masses, 0), axis=0), mass)
            few = tl.sum(tl.where(level == low, counts, 0), axis=0) - count <= CHUNK
            is_open = is_open & (high < 0)
            new_floor = _edge(origin, floor, low, turn, LEVELS)
            origin = tl.where(moved, _edge(origin, floor, high, turn, LEVELS), origin)
            floor = new_floor
    return origin, floor, is_open, count, mass, total, by_k, few


@triton.jit
def _wants_cut(temperature, top, top_k, top_p, vocab):
    return (temperature > 0) & is_finite(top) & (((top_k > 0) & (top_k < vocab)) | (top_p < 1))


@triton.jit
def _is_short(top_k, blocks):
    """k blocks have k maxima, so that the k-th of these is at most the k-th logit: no round is needed to list all."""
    return (top_k > 0) & (top_k <= blocks)


@triton.jit
def _short_floor(max_ptr, row, blocks, top_k, MERGE: tl.constexpr):
    """The k-th largest maximum of the blocks."""
    at = tl.arange(0, MERGE)
    m = tl.load(max_ptr + row.to(tl.int64) * blocks + at, mask=at < blocks, other=float("-inf"))
    ahead = tl.sum((m[:, None] >= m[None, :]).to(tl.int32), axis=0)
    return tl.max(tl.where(ahead >= top_k, m, float("-inf")), axis=0)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_p_ptr"])
def narrow(
    values_ptr, max_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    tables_ptr,  # [rows, rounds, (counts, weights), LEVELS] int64, zero before the first round
    vocab, stride,
    BLOCK: tl.constexpr, MERGE: tl.constexpr, LEVELS: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks). How many tokens of this block, and how much weight, lie at or above each level."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    top = row_max(max_ptr, row, tl.num_programs(1), MERGE)
    # A block whose maximum is below the range adds to no level.
    mine = tl.load(max_ptr + row.to(tl.int64) * tl.num_programs(1) + block)
    if _wants_cut(temperature, top, top_k, top_p, vocab) & (_is_short(top_k, tl.num_programs(1)) == 0):
        known = _range(tables_ptr, row, top, temperature, top_k, top_p, vocab, ROUND, LEVELS, BLOCK)
        origin, floor = known[0], known[1]
        if (mine >= floor) & (known[7] == 0):
            x = load_block(values_ptr, row, block, vocab, stride, BLOCK)[1]
            packed = weight_of(share_of(x, top, steepness(temperature))) + COUNT_ONE
            level = tl.arange(0, LEVELS)
            sums = tl.zeros([LEVELS], tl.int64)
            for i in tl.static_range(LEVELS):
                edge = _edge(origin, floor, tl.full([], i, tl.int32), ROUND, LEVELS)
                sums = tl.where(level == i, tl.sum(tl.where(x >= edge, packed, 0), axis=0), sums)
            table = tables_ptr + (row * TURNS + ROUND) * 2 * LEVELS + level
            tl.atomic_add(table, sums >> COUNT_SHIFT, sem="relaxed")
            tl.atomic_add(table + LEVELS, sums & WEIGHT_MASK, sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_p_ptr"])
def collect(
    values_ptr, max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, tables_ptr,
    list_ptr,  # [rows, vocab] int32: tokens in the range, in any order
    length_ptr,  # [rows] int32, zero before
    vocab, stride,
    BLOCK: tl.constexpr, MERGE: tl.constexpr, LEVELS: tl.constexpr, ROUNDS: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks). Lists the tokens that may be the last one kept."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    top = row_max(max_ptr, row, tl.num_programs(1), MERGE)
    mine = tl.load(max_ptr + row.to(tl.int64) * tl.num_programs(1) + block)
    if _wants_cut(temperature, top, top_k, top_p, vocab):
        known = _range(tables_ptr, row, top, temperature, top_k, top_p, vocab, ROUNDS, LEVELS, BLOCK)
        origin, floor, is_open, by_k = known[0], known[1], known[2], known[6]
        if _is_short(top_k, tl.num_programs(1)):
            # Nothing without weight is listed, least of all -inf; with fewer than k tokens left, all are kept.
            weightless = top - SPAN * temperature
            floor = tl.maximum(_short_floor(max_ptr, row, tl.num_programs(1), top_k, MERGE), weightless)
            is_open, by_k = top == top, top == top
        if (mine >= floor) & (by_k | (top_p < 1)):
            token, x = load_block(values_ptr, row, block, vocab, stride, BLOCK)
            ceiling = tl.where(is_open, float("inf"), origin)
            wanted = (x >= floor) & (x < ceiling)
            # Places by a prefix sum. An atomic for each token instead is 11 % faster for 64 rows of top-k 40 and 9 %
            # slower for top-p 0.9, whose lists are longer (H200, Triton 3.6).
            count = tl.sum(wanted.to(tl.int32), axis=0)
            if count > 0:
                start = tl.atomic_add(length_ptr + row, count, sem="relaxed")
                place = start + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
                tl.store(list_ptr + row.to(tl.int64) * vocab + place, token, mask=wanted)


@triton.jit
def _listed(list_ptr, values_ptr, start, length, top, steep, CHUNK: tl.constexpr):
    """Ranks and weights of a part of the list."""
    at = start + tl.arange(0, CHUNK)
    token = tl.load(list_ptr + at, mask=at < length, other=0)
    x = tl.load(values_ptr + token, mask=at < length, other=float("-inf"))
    ranks = tl.where(at < length, rank(x, token), NEVER)
    return ranks, tl.where(at < length, weight_of(share_of(x, top, steep)), 0)


@triton.jit
def _tally(pivot, ranks, weights, list_ptr, values_ptr, length, top, steep, CHUNK: tl.constexpr):
    """How many listed tokens have a rank of at least ``pivot``, and their weight. The first part is in registers."""
    count = tl.sum((ranks >= pivot).to(tl.int64), axis=0)
    mass = tl.sum(tl.where(ranks >= pivot, weights, 0), axis=0)
    for start in range(CHUNK, length, CHUNK):
        more, heavy = _listed(list_ptr, values_ptr, start, length, top, steep, CHUNK)
        count += tl.sum((more >= pivot).to(tl.int64), axis=0)
        mass += tl.sum(tl.where(more >= pivot, heavy, 0), axis=0)
    return count, mass


@triton.jit
def _halve(
    low, high, least, wanted, base, ranks, weights, list_ptr, values_ptr, length, top, steep,
    BY_MASS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A rank with as few listed tokens at or above it as make ``base`` reach ``wanted``; ``least`` of them are above
    ``high``, where they do not suffice, and ``low`` is a rank where they do."""
    most = _tally(low, ranks, weights, list_ptr, values_ptr, length, top, steep, CHUNK)[0]
    # Ranks differ, so one token between the two bounds settles it; it never comes to neighbouring bounds before.
    while (most - least > 1) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        count, mass = _tally(middle, ranks, weights, list_ptr, values_ptr, length, top, steep, CHUNK)
        enough = base + (mass if BY_MASS else count) >= wanted
        low, most = tl.where(enough, middle, low), tl.where(enough, count, most)
        high, least = tl.where(enough, high, middle), tl.where(enough, least, count)
    return low


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_p_ptr"])
def settle(
    values_ptr, max_ptr, temperature_ptr, top_k_ptr, top_p_ptr, tables_ptr, list_ptr, length_ptr,
    cutoff_ptr,  # [rows] int64: the least rank that is kept
    vocab, stride, blocks,
    MERGE: tl.constexpr, LEVELS: tl.constexpr, ROUNDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). The cut, to the token."""
    row = tl.program_id(0)
    temperature, top_k, top_p = tl.load(temperature_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    top = row_max(max_ptr, row, blocks, MERGE)
    length = tl.load(length_ptr + row)
    cutoff = tl.full([], NEVER, tl.int64)
    if _wants_cut(temperature, top, top_k, top_p, vocab) & (length > 0):
        known = _range(tables_ptr, row, top, temperature, top_k, top_p, vocab, ROUNDS, LEVELS, CHUNK)
        count, mass, total, by_k = known[3], known[4], known[5], known[6]
        if _is_short(top_k, blocks):  # what is listed is all that there is above the floor
            count, mass, by_k = tl.zeros([], tl.int64), tl.zeros([], tl.int64), top == top
        mine_ptr = list_ptr + row.to(tl.int64) * vocab
        row_ptr = values_ptr + row.to(tl.int64) * stride
        steep = steepness(temperature)
        ranks, weights = _listed(mine_ptr, row_ptr, 0, length, top, steep, CHUNK)
        low = tl.min(tl.where(ranks == NEVER, HIGHEST, ranks), axis=0)
        high = tl.max(ranks, axis=0) + 1
        for start in range(CHUNK, length, CHUNK):
            more = _listed(mine_ptr, row_ptr, start, length, top, steep, CHUNK)[0]
            low = tl.minimum(low, tl.min(tl.where(more == NEVER, HIGHEST, more), axis=0))
            high = tl.maximum(high, tl.max(more, axis=0) + 1)
        none = tl.zeros([], tl.int64)
        if by_k:
            low = _halve(
                low, high, none, top_k.to(tl.int64), count, ranks, weights, mine_ptr, row_ptr, length, top, steep,
                False, CHUNK,
            )  # fmt: skip
            total = mass + _tally(low, ranks, weights, mine_ptr, row_ptr, length, top, steep, CHUNK)[1]
        if top_p < 1:
            low = _halve(
                low, high, none, _share(top_p, total), mass, ranks, weights, mine_ptr, row_ptr, length, top, steep,
                True, CHUNK,
            )  # fmt: skip
        cutoff = low
    tl.store(cutoff_ptr + row, cutoff)


@triton.jit(do_not_specialize=["count"])
def top_blocks(
    logits_ptr, max_ptr,
    found_ptr,  # [rows, blocks, WIDTH] int64: ranks, falling
    vocab, stride, count,
    BLOCK: tl.constexpr, MERGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks). The ``count`` largest logits of a block, if any of them can be among the row's."""
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    at = tl.arange(0, MERGE)
    m = tl.load(max_ptr + row.to(tl.int64) * blocks + at, mask=at < blocks, other=float("-inf"))
    mine = tl.load(max_ptr + row.to(tl.int64) * blocks + block)
    ahead = tl.sum(((m > mine) | ((m == mine) & (at < block))).to(tl.int32), axis=0)
    column = tl.arange(0, WIDTH)
    found = tl.full([WIDTH], NEVER, tl.int64)
    if ahead < count:
        token, x = load_block(logits_ptr, row, block, vocab, stride, BLOCK)
        ranks = tl.where(token < vocab, rank(x, token), NEVER)
        for i in range(count):
            best = tl.max(ranks, axis=0)
            ranks = tl.where(ranks == best, NEVER, ranks)
            found = tl.where(column == i, best, found)
    tl.store(found_ptr + (row.to(tl.int64) * blocks + block) * WIDTH + column, found)


@triton.jit(do_not_specialize=["count"])
def top_merge(
    found_ptr, raw_max_ptr, raw_sum_ptr,
    tokens_ptr, logprobs_ptr,  # [rows, count]
    blocks, count,
    MERGE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). The largest of all blocks, with their log-probabilities."""
    row = tl.program_id(0)
    at = tl.arange(0, MERGE * WIDTH)
    inside = at < blocks * WIDTH
    ranks = tl.load(found_ptr + row.to(tl.int64) * blocks * WIDTH + at, mask=inside, other=NEVER)
    raw_top = row_max(raw_max_ptr, row, blocks, MERGE)
    block = tl.arange(0, MERGE)
    place = row.to(tl.int64) * blocks + block
    m = tl.load(raw_max_ptr + place, mask=block < blocks, other=float("-inf"))
    part = tl.load(raw_sum_ptr + place, mask=block < blocks, other=0.0)
    total = tl.sum(tl.where(m > float("-inf"), part * tl.exp(m - raw_top), 0.0), axis=0)
    for i in range(count):
        best = tl.max(ranks, axis=0)
        ranks = tl.where(ranks == best, NEVER, ranks)
        ordered = (best >> 32).to(tl.int32)
        x = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(tokens_ptr + row * count + i, 0x7FFFFFFF - best.to(tl.int32))
        tl.store(logprobs_ptr + row * count + i, x - raw_top - tl.log(total))
