"""Jit code of routing: top-k over the experts, and the sort of (token, expert) pairs by expert.

A pair is ``token * TOP_K + slot``. Everything is computed from one matrix, ``slot[token, expert]``: the slot in which a
token chose an expert, or -1. A token chooses an expert at most once, so the exclusive sum of ``slot >= 0`` down a
column is the rank of a pair among its expert's pairs. Order, offsets and tiles follow from sums: no sort network, no
atomics, and the same result in every run.

``choose_many`` per block of tokens, ``prefix_counts`` over the blocks, ``place_many`` per block again.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

NEVER: tl.constexpr = tl.constexpr(-(2**63))


@triton.jit
def _ordered(bits):
    """Float32 bits ↔ integers in the same order as the floats; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def choose(
    logits_ptr,
    scale_ptr,
    ids_ptr,
    weights_ptr,
    rows,
    num_tokens,
    num_experts,
    stride_logits,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ALWAYS: tl.constexpr = False,
):
    """Top-k and its softmax for ``rows``: writes ids and weights, returns ``slot [rows, E_PAD]``. ALWAYS: the last slot
    goes to one expert more, by the sigmoid of its logit; it is in no slot matrix.

    The key holds the logit above the negated index: its maximum is the largest logit and, among equals, the lowest
    index, and no key occurs twice. NaN ranks above +inf, so a row with a NaN gets NaN weights, and ids in range.
    """
    expert = tl.arange(0, E_PAD)
    row_ok = rows < num_tokens
    ok = row_ok[:, None] & (expert < num_experts)[None, :]
    at = rows.to(tl.int64)[:, None] * stride_logits + expert[None, :]
    x = tl.load(logits_ptr + at, mask=ok, other=0.0).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 ties with 0.0
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    key = (_ordered(bits).to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)[None, :]
    key = tl.where((expert < num_experts)[None, :], key, NEVER)

    column = tl.arange(0, K_PAD)[None, :]
    ids = tl.zeros([rows.shape[0], K_PAD], tl.int32)
    values = tl.full([rows.shape[0], K_PAD], float("-inf"), tl.float32)
    mark = tl.full([], NEVER + 1, tl.int64)
    CHOSEN: tl.constexpr = TOP_K - 1 if ALWAYS else TOP_K
    for i in range(CHOSEN):
        best = tl.max(key, axis=1)
        # What was chosen drops below every real key and remembers its slot there: no second matrix in registers.
        key = tl.where(key == best[:, None], mark + i, key)
        value = _ordered((best >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
        ids = tl.where(column == i, (0x7FFFFFFF - best.to(tl.int32))[:, None], ids)
        values = tl.where(column == i, value[:, None], values)

    # Slot 0 holds the largest. Renormalising a softmax over all experts cancels its sum: both kinds of router are this.
    largest = tl.sum(tl.where(column == 0, values, 0.0), axis=1)
    p = tl.where(column < CHOSEN, tl.exp(values - largest[:, None]), 0.0)
    weights = p / tl.sum(p, axis=1)[:, None]
    out = rows[:, None] * TOP_K + column
    out_ok = row_ok[:, None] & (column < TOP_K)
    if HAS_SCALE:
        weights *= tl.load(scale_ptr + ids, mask=out_ok, other=0.0).to(tl.float32)
    if ALWAYS:
        last = tl.load(logits_ptr + rows.to(tl.int64) * stride_logits + num_experts, mask=row_ok, other=0.0)
        ids = tl.where(column == CHOSEN, num_experts, ids)
        weights = tl.where(column == CHOSEN, tl.sigmoid(last.to(tl.float32))[:, None], weights)
    tl.store(ids_ptr + out, ids, mask=out_ok)
    tl.store(weights_ptr + out, weights, mask=out_ok)
    return tl.where(row_ok[:, None] & (key <= NEVER + TOP_K), key.to(tl.int32) - 1, -1)


@triton.jit
def _slots_of(ids_ptr, rows, num_tokens, TOP_K: tl.constexpr, E_PAD: tl.constexpr):
    """``slot [rows, E_PAD]`` of ids that are chosen already. An id outside the table matches no expert."""
    expert = tl.arange(0, E_PAD)[None, :]
    slot = tl.full([rows.shape[0], E_PAD], -1, tl.int32)
    for i in range(TOP_K):
        chosen = tl.load(ids_ptr + rows * TOP_K + i, mask=rows < num_tokens, other=-1)
        slot = tl.where(chosen[:, None] == expert, i, slot)
    return slot


@triton.jit
def _place(order_ptr, slot, rows, first, TOP_K: tl.constexpr):
    """Writes the pairs of ``slot`` to their places; ``first [E_PAD]``: where the pairs of these rows begin."""
    chosen = (slot >= 0).to(tl.int32)
    rank = tl.cumsum(chosen, axis=0) - chosen
    tl.store(order_ptr + first[None, :] + rank, rows[:, None] * TOP_K + slot, mask=slot >= 0)


@triton.jit
def _store_offsets(offsets_ptr, counts, ends, num_experts):
    expert = tl.arange(0, counts.shape[0])
    tl.store(offsets_ptr + expert, ends - counts, mask=expert < num_experts)
    tl.store(offsets_ptr + 1 + expert, ends, mask=expert == num_experts - 1)


@triton.jit
def _store_tiles(tiles_ptr, entry, bound, counts, ends, block):
    """Tiles ``entry``: expert, first place, number of pairs, the expert's first tile; past the end -1, 0, 0, 0.

    The expert of an entry is the number of experts whose tiles all come before it: experts in ascending order, an
    expert's tiles side by side, so that a launch in list order reads each weight from memory once.
    """
    num_tiles = (counts + block - 1) // block
    tile_ends = tl.cumsum(num_tiles, axis=0)
    expert = tl.sum((tile_ends[None, :] <= entry[:, None]).to(tl.int32), axis=1)
    column = tl.arange(0, counts.shape[0])[None, :]
    mine = column == expert[:, None]
    end = tl.sum(tl.where(mine, ends[None, :], 0), axis=1)
    count = tl.sum(tl.where(mine, counts[None, :], 0), axis=1)
    first = tl.sum(tl.where(mine, (tile_ends - num_tiles)[None, :], 0), axis=1)
    ok = entry < tl.max(tile_ends, axis=0)
    done = (entry - first) * block
    at = tiles_ptr + entry * 4
    tl.store(at, tl.where(ok, expert, -1), mask=entry < bound)
    tl.store(at + 1, tl.where(ok, end - count + done, 0), mask=entry < bound)
    tl.store(at + 2, tl.where(ok, tl.minimum(count - done, block), 0), mask=entry < bound)
    tl.store(at + 3, tl.where(ok, first, 0), mask=entry < bound)


@triton.jit(do_not_specialize=["num_tokens"])
def choose_many(
    logits_ptr,
    scale_ptr,
    ids_ptr,
    weights_ptr,
    block_counts_ptr,  # [blocks, experts] int32
    num_tokens,
    num_experts,
    stride_logits,
    TOP_K: tl.constexpr,
    K_PAD: tl.constexpr,
    E_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    FROM_LOGITS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    ALWAYS: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Top-k of one block of tokens, and how many of them chose each expert."""
    pid = tl.program_id(0)
    rows = pid * ROWS + tl.arange(0, ROWS)
    if FROM_LOGITS:
        slot = choose(
            logits_ptr, scale_ptr, ids_ptr, weights_ptr, rows, num_tokens, num_experts, stride_logits,
            TOP_K, K_PAD, E_PAD, HAS_SCALE, ALWAYS,
        )  # fmt: skip
    else:
        slot = _slots_of(ids_ptr, rows, num_tokens, TOP_K, E_PAD)
    if COUNT:
        expert = tl.arange(0, E_PAD)
        counts = tl.sum((slot >= 0).to(tl.int32), axis=0)
        tl.store(block_counts_ptr + pid * num_experts + expert, counts, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_blocks"])
def prefix_counts(block_counts_ptr, counts_ptr, num_blocks, num_experts, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Turns the counts of each block into the sums of the blocks before it, in place, and writes the totals."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_blocks, BLOCKS):
        row = start + tl.arange(0, BLOCKS)
        ok = (row < num_blocks)[:, None] & (expert < num_experts)[None, :]
        at = block_counts_ptr + row[:, None] * num_experts + expert[None, :]
        counts = tl.load(at, mask=ok, other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=ok)
        total += tl.sum(counts, axis=0)
    tl.store(counts_ptr + expert, total, mask=expert < num_experts)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "block", "bound"])
def place_many(
    ids_ptr,
    block_counts_ptr,  # exclusive sums, from prefix_counts
    counts_ptr,
    offsets_ptr,
    order_ptr,
    tiles_ptr,
    num_tokens,
    num_experts,
    num_blocks,
    block,
    bound,
    TOP_K: tl.constexpr,
    E_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """The first ``num_blocks`` programs place one block of tokens each; the others write ``ENTRIES`` tiles each."""
    pid = tl.program_id(0)
    expert = tl.arange(0, E_PAD)
    counts = tl.load(counts_ptr + expert, mask=expert < num_experts, other=0)
    ends = tl.cumsum(counts, axis=0)
    if pid < num_blocks:
        rows = pid * ROWS + tl.arange(0, ROWS)
        before = tl.load(block_counts_ptr + pid * num_experts + expert, mask=expert < num_experts, other=0)
        _place(order_ptr, _slots_of(ids_ptr, rows, num_tokens, TOP_K, E_PAD), rows, ends - counts + before, TOP_K)
    else:
        entry = (pid - num_blocks) * ENTRIES + tl.arange(0, ENTRIES)
        _store_tiles(tiles_ptr, entry, bound, counts, ends, block)
    if pid == 0:
        _store_offsets(offsets_ptr, counts, ends, num_experts)
