"""The jit code of ``triton_paged`` around the splits of short sequences: fetch their keys early, and add them up.

Many splits have a launch of their own, ``merge_splits``. Few are added up by the last program of ``attend_short``; that
and the early fetch are for layers whose attention is all latency: a window of 1024 keys is 33 splits of 33 KB at most.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16

# Numbers of two bytes in a line of the cache.
LINE = tl.constexpr(64)
# Sequences whose lengths a program of attend_short reads at a time: a warp's worth, so that sums need no shared memory.
BLOCK_S = tl.constexpr(32)
# Splits that a program of merge_splits loads at a time.
BLOCK_P = tl.constexpr(32)
# Numbers that the last program adds up at a time, of one split: all rows of one token in Gemma 4's sliding layers (two
# of 256) and in gpt-oss (eight of 64).
MERGE_NUMBERS = tl.constexpr(512)


@triton.jit
def _num_blocks(
    query_start_ptr, context_lens_ptr, seq, mask, window, block_q, BLOCK_N: tl.constexpr, OLD: tl.constexpr
):
    """Blocks of keys that short sequences ``seq`` need; none for those that are not short or have no new token."""
    query_first = tl.load(query_start_ptr + seq, mask=mask, other=0)
    query_len = tl.load(query_start_ptr + seq + 1, mask=mask, other=0) - query_first
    last = tl.load(context_lens_ptr + seq, mask=mask, other=0)
    first = tl.maximum(last - query_len - window + 1, 0)
    if OLD:  # one at least: somebody takes the new keys
        blocks = tl.maximum(tl.cdiv(last - query_len - first, BLOCK_N), 1)
    else:
        blocks = tl.cdiv(last - first, BLOCK_N)
    return tl.where((query_len > 0) & (query_len <= block_q), blocks, 0)


@triton.jit
def _cut(blocks, size):
    """Splits of ``blocks`` blocks, and the blocks of each: no fewer than ``size``, evenly, and none left empty."""
    share = tl.cdiv(blocks, tl.maximum(blocks // size, 1))
    return tl.cdiv(blocks, tl.maximum(share, 1)), share


@triton.jit
def _find_split(
    query_start_ptr, context_lens_ptr, num_sequences, window, block_q, program, wanted, least,
    BLOCK_N: tl.constexpr, OLD: tl.constexpr,
):  # fmt: skip
    """Of ``program``: its sequence (-1: none), the blocks of a split, the sequence's first program and its splits.

    Sequences are cut in proportion to their blocks, so that there are ``wanted`` splits of all keys or fewer; a
    sequence shorter than that has one, so there may be one more for each.
    """
    lane = tl.arange(0, BLOCK_S)
    total = 0
    for at in tl.range(0, num_sequences, BLOCK_S):
        seq = at + lane
        mask = seq < num_sequences
        blocks = _num_blocks(query_start_ptr, context_lens_ptr, seq, mask, window, block_q, BLOCK_N, OLD)
        total += tl.sum(blocks, axis=0)
    size = tl.maximum(tl.cdiv(total, wanted), least)
    found = -1
    share = 0
    first = 0
    splits = 0
    before = 0
    for at in tl.range(0, num_sequences, BLOCK_S):
        seq = at + lane
        mask = seq < num_sequences
        blocks = _num_blocks(query_start_ptr, context_lens_ptr, seq, mask, window, block_q, BLOCK_N, OLD)
        count, shares = _cut(blocks, size)
        begin = before + tl.cumsum(count, axis=0) - count
        mine = (begin <= program) & (program < begin + count)
        found += tl.sum(tl.where(mine, seq + 1, 0), axis=0)
        share += tl.sum(tl.where(mine, shares, 0), axis=0)
        first += tl.sum(tl.where(mine, begin, 0), axis=0)
        splits += tl.sum(tl.where(mine, count, 0), axis=0)
        before += tl.sum(count, axis=0)
    return found, share, first, splits


@triton.jit
def find_work(
    query_start_ptr, context_lens_ptr, num_sequences, window, block_q, wanted, least,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr, OLD: tl.constexpr = False,
):  # fmt: skip
    """What this program is to do: whether anything, which split, of which sequence, and that one's tokens and keys.

    Keys are ``first`` to ``last`` for the sequence, ``begin`` to ``end`` for the split. Blocks are counted from the
    window's first key on: a window of 128 is one block of 128 and not two. OLD: splits share the keys before the new
    tokens only.
    """
    program = tl.program_id(0)
    if SPLIT:
        if num_sequences == 1:  # nothing to look for: these steps stand before the first load of a split
            blocks = _num_blocks(query_start_ptr, context_lens_ptr, 0, num_sequences > 0, window, block_q, BLOCK_N, OLD)
            splits, size = _cut(blocks, tl.maximum(tl.cdiv(blocks, wanted), least))
            seq = tl.where(program < splits, 0, -1)
            first_program = 0
        else:
            seq, size, first_program, splits = _find_split(
                query_start_ptr, context_lens_ptr, num_sequences, window, block_q, program, wanted, least, BLOCK_N, OLD
            )
        live = seq >= 0
        seq = tl.maximum(seq, 0)
        split = program - first_program
    else:
        seq = program
        split = 0
        first_program = program
        splits = 1
    query_first = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_first
    last = tl.load(context_lens_ptr + seq)
    first = tl.maximum(last - query_len - window + 1, 0)
    begin = first
    end = last
    if OLD:
        end -= query_len
    if SPLIT:
        begin += split * size * BLOCK_N
        end = tl.minimum(begin + size * BLOCK_N, end)
    short = (query_len > 0) & (query_len <= block_q)
    if SPLIT:
        live = live & short
    else:
        live = short
    return live, seq, split, first_program, splits, query_first, query_len, first, last, begin, end


@triton.jit
def _to_l2(pointers):
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_keys(
    k_ptr, v_ptr, table_ptr, begin, first, last, stride_page, page_shift, WIDTH: tl.constexpr, KEYS: tl.constexpr
):
    """Bring keys and values of the positions from ``begin`` on to L2, while the kernel before still makes the queries.

    Positions outside of first..last repeat one inside: pages that a window has left may be anyone's. The newest key may
    come too early, before it is written: L2 is where it will be written, so it is read right later.
    """
    n = tl.minimum(tl.maximum(begin + tl.arange(0, KEYS), first), last - 1)
    page = tl.load(table_ptr + (n >> page_shift)).to(tl.int64)
    slots = page * stride_page + (n & ((1 << page_shift) - 1)) * WIDTH
    at = slots[:, None] + (tl.arange(0, (WIDTH + LINE - 1) // LINE) * LINE)[None, :]
    _to_l2(k_ptr + at)
    _to_l2(v_ptr + at)


@triton.jit
def _rounded_product(a, b, PLAIN: tl.constexpr):
    """``a * b``, rounded before it is added to anything.

    Where lanes sum up products in pairs the compiler would fuse each lane's own product into the sum. Then both lanes
    have the same sum in different last bits, and which of them a store to shared memory leaves there is undefined.
    """
    if PLAIN:
        return a * b
    else:
        return tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def merge_in_place(
    partial_ptr, summary_ptr, out_ptr, first, splits, kv_head, kv_heads, query_first, num_rows, first_head, group,
    stride_out_token, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """What ``merge_splits`` does, for all rows of one sequence and one KV head, in the order of the splits."""
    dims = tl.arange(0, HEAD_DIM)
    MERGE_ROWS: tl.constexpr = MERGE_NUMBERS // HEAD_DIM
    # 32 registers a thread, or 8 for small heads: with more (Triton 3.6; 3.7: with 8 splits) an SM holds three programs
    # and not four.
    MERGE_SPLITS: tl.constexpr = 2 if HEAD_DIM == 64 else 8
    for row_begin in tl.range(0, num_rows, MERGE_ROWS):
        row = row_begin + tl.arange(0, MERGE_ROWS)
        top = tl.full([MERGE_ROWS], -1.0e30, tl.float32)
        total = tl.zeros([MERGE_ROWS], tl.float32)
        acc = tl.zeros([MERGE_ROWS, HEAD_DIM], tl.float32)
        for begin in tl.range(0, splits, MERGE_SPLITS):
            split = begin + tl.arange(0, MERGE_SPLITS)
            ok = (split < splits)[:, None] & (row < num_rows)[None, :]
            at = ((first + split) * kv_heads + kv_head)[:, None] * BLOCK_M + row[None, :]
            tops = tl.load(summary_ptr + at * 2, mask=ok, other=-1.0e30)
            totals = tl.load(summary_ptr + at * 2 + 1, mask=ok, other=0.0)
            parts = tl.load(
                partial_ptr + at[:, :, None] * HEAD_DIM + dims[None, None, :], mask=ok[:, :, None], other=0.0
            )
            new_top = tl.maximum(top, tl.max(tops, axis=0))
            weight = tl.exp2(tops - new_top[None, :])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(_rounded_product(totals, weight, PLAIN), axis=0)
            acc = acc * shrink[:, None] + tl.sum(parts * weight[:, :, None], axis=0)
            top = new_top
        query = (query_first + row // group).to(tl.int64)
        head = first_head + row % group
        place = (query * stride_out_token + head * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out_ptr + place, to_bf16(acc / total[:, None], PLAIN), mask=(row < num_rows)[:, None])


@triton.jit(do_not_specialize=["group"])
def merge_splits(
    partial_ptr, summary_ptr, spans_ptr, out_ptr, query_start_ptr, group, stride_out_token,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences, query heads). Adds up the splits of the short sequences that ``attend_short`` cut. PARTS:
    blocks of rows in which a sequence's tokens stand."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    if PDL:
        let_next_begin_and_wait()
    query_first = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_first
    tokens = BLOCK_M // group  # of a block
    if (query_len == 0) | (query_len > tokens * PARTS):
        return
    first = tl.load(spans_ptr + 2 * seq)
    splits = tl.load(spans_ptr + 2 * seq + 1)
    if splits == 1:
        return
    dims = tl.arange(0, HEAD_DIM)
    blocks = tl.num_programs(1) // group * PARTS
    for token in tl.range(0, query_len):
        top = -1.0e30
        total = 0.0
        acc = tl.zeros([HEAD_DIM], tl.float32)
        for begin in tl.range(0, splits, BLOCK_P):
            split = begin + tl.arange(0, BLOCK_P)
            mask = split < splits
            block = (first + split) * blocks + head // group * PARTS
            if PARTS == 1:  # a division less: it spills otherwise (heads of 128, SM 9.0, Triton 3.6)
                row = block * BLOCK_M + token * group + head % group
            else:
                row = (block + token // tokens) * BLOCK_M + token % tokens * group + head % group
            tops = tl.load(summary_ptr + row * 2, mask=mask, other=-1.0e30)
            totals = tl.load(summary_ptr + row * 2 + 1, mask=mask, other=0.0)
            parts = tl.load(partial_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=mask[:, None], other=0.0)
            new_top = tl.maximum(top, tl.max(tops, axis=0))
            weight = tl.exp2(tops - new_top)
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(totals * weight, axis=0)
            acc = acc * shrink + tl.sum(parts * weight[:, None], axis=0)
            top = new_top
        at = (query_first + token).to(tl.int64) * stride_out_token + head * HEAD_DIM + dims
        tl.store(out_ptr + at, to_bf16(acc / total, PLAIN))
