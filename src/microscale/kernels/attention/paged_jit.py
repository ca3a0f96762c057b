"""The jit code of ``triton_paged``: one program attends a block of query rows over a range of one sequence's keys.

A row is one query head of one token. The query heads that share a KV head sit together, so that a key read once serves
all of them: row r of a block is token ``r // group``, head ``r % group`` of the group.

    keys of a sequence:   |  never read  |   LEFT    |      FREE       |  DIAGONAL |
                          0            first       left             right        last
                                    (window of     all rows see     rows differ
                                     the 1st row)  every key        at the causal end

Only the keys from ``first`` to ``last`` are loaded. LEFT and DIAGONAL are masked row by row, FREE is not: at 8192
tokens it is nearly everything. Sizes that vary from call to call (group, window, page size) are run-time numbers, so
that one compiled kernel serves them all: ``page_shift`` is log2 of the page size, a layer without a window has a huge
one, and a layer without sinks has sinks of minus infinity.
"""

import triton
import triton.language as tl

from microscale.kernels.plain_jit import to_bf16

LOG2E = tl.constexpr(1.4426950408889634)
# E4M3 bits moved into bf16 are 2**120 too small. Half of that is put on the other operand, half on the result: both
# stay far from the ends of bf16.
HALF_SHIFT = tl.constexpr(2.0**60)


@triton.jit
def _e4m3_to_bf16(x):
    """E4M3 bytes as bf16 numbers times 2**-120, by bits: exact on every GPU, subnormals included. NaN is not kept."""
    wide = x.to(tl.uint16)
    return (((wide & 0x7F) << 4) | ((wide & 0x80) << 8)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _slots(table_ptr, n, valid, stride_page, page_shift, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Where positions ``n`` of a sequence lie within one KV head: ``[BLOCK_N]`` element offsets."""
    if MASKED:
        page = tl.load(table_ptr + (n >> page_shift), mask=valid, other=0).to(tl.int64)
    else:
        page = tl.load(table_ptr + (n >> page_shift)).to(tl.int64)
    return page * stride_page + (n & ((1 << page_shift) - 1)) * HEAD_DIM


@triton.jit
def _load_rows(ptr, slots, valid, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values ``[BLOCK_N, HEAD_DIM]`` in bf16; zeros where not ``valid`` if MASKED."""
    pointers = ptr + slots[:, None] + tl.arange(0, HEAD_DIM)[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=valid[:, None], other=0)
    else:
        rows = tl.load(pointers)
    if KV_FP8:
        rows = _e4m3_to_bf16(rows)
    return rows


@triton.jit
def _dot(a, b, PLAIN: tl.constexpr):
    """``a @ b`` in float32. PLAIN is for Triton's interpreter, which multiplies the bits of bf16 operands."""
    if PLAIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _attend(
    state, q, k_ptr, v_ptr, table_ptr, positions, window, begin, first, last, stride_page, page_shift, scale,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the BLOCK_N keys from ``begin`` on into the running softmax ``(acc, top, total)``."""
    acc, top, total = state
    n = begin + tl.arange(0, BLOCK_N)
    # A value outside first..last may be NaN from a page that was freed or never written, and 0 * NaN is NaN.
    valid = (n >= first) & (n < last)
    slots = _slots(table_ptr, n, valid, stride_page, page_shift, HEAD_DIM, MASKED)
    k = _load_rows(k_ptr, slots, valid, HEAD_DIM, KV_FP8, MASKED)
    scores = _dot(q, tl.trans(k), PLAIN) * scale
    if MASKED:
        visible = (n[None, :] <= positions[:, None]) & (n[None, :] > positions[:, None] - window) & valid[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, axis=1)
    v = _load_rows(v_ptr, slots, valid, HEAD_DIM, KV_FP8, MASKED)
    if KV_FP8:
        weights *= HALF_SHIFT
    acc = acc * shrink[:, None] + _dot(to_bf16(weights, PLAIN), v, PLAIN)
    return acc, new_top, total


@triton.jit
def _find_sequence(query_start_ptr, num_sequences, block, block_q):
    """The sequence of query block ``block``: the last s with query_start[s] // block_q + s <= block.

    Sequence s is given ceil(length / block_q) blocks or one more, so that block numbers follow without a list.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // block_q + middle <= block:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_sequences", "window", "page_shift", "group", "num_splits"])
def paged_attention(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, partial_ptr, summary_ptr,
    query_start_ptr, context_lens_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, window, page_shift, group, num_splits, scale,
    stride_q_token, stride_out_token, stride_page, stride_kv_head, stride_table,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KV_FP8: tl.constexpr, DECODE: tl.constexpr,
    SPLIT: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (query blocks, KV heads, splits of the keys).

    DECODE: every sequence has one new token or none, and a block is a sequence. SPLIT: results go to ``partial``, for
    ``merge_splits``.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    block_q = BLOCK_M // group
    if DECODE:
        seq = block
    else:
        seq = _find_sequence(query_start_ptr, num_sequences, block, block_q)
    query_first = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_first
    context_len = tl.load(context_lens_ptr + seq)
    if DECODE:
        token_first = 0
    else:
        token_first = (block - query_first // block_q - seq) * block_q
    if token_first >= query_len:
        return

    rows = tl.arange(0, BLOCK_M)
    token = token_first + rows // group
    row_valid = (rows // group < block_q) & (token < query_len)
    head = kv_head * group + rows % group
    # Rows past the end compute like the last token, so that the masks below stay simple; they are not stored.
    positions = context_len - query_len + tl.minimum(token, query_len - 1)
    query = (query_first + token).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(
        q_ptr + (query * stride_q_token + head * HEAD_DIM)[:, None] + dims[None, :], row_valid[:, None], other=0.0
    )

    position_first = context_len - query_len + token_first
    last = tl.minimum(position_first + block_q, context_len)
    first = tl.maximum(position_first - window + 1, 0)
    # A split takes whole blocks of keys, the same number each, counted from the first block that is needed.
    base = first // BLOCK_N * BLOCK_N
    per_split = tl.cdiv(tl.cdiv(last - base, BLOCK_N), num_splits) * BLOCK_N
    begin = base + split * per_split
    end = tl.minimum(begin + per_split, last)
    # FREE: every row sees the key. Its first block is past the last row's window's start, its end is at the first row.
    left = tl.maximum(tl.cdiv(tl.maximum(last - window, 0), BLOCK_N) * BLOCK_N, begin)
    right = tl.minimum((position_first + 1) // BLOCK_N * BLOCK_N, end)
    left = tl.minimum(left, end)
    right = tl.maximum(right, left)

    scale *= LOG2E
    if KV_FP8:
        scale *= tl.load(k_scale_ptr + kv_head) * HALF_SHIFT
        q = (q.to(tl.float32) * HALF_SHIFT).to(tl.bfloat16)
    k_head_ptr = k_ptr + kv_head * stride_kv_head
    v_head_ptr = v_ptr + kv_head * stride_kv_head
    table_ptr = page_table_ptr + seq * stride_table
    # The sink takes part as a key without a value, once: in the first split.
    sink = tl.load(sinks_ptr + head, mask=row_valid & (split == 0), other=float("-inf")).to(tl.float32) * LOG2E
    top = tl.maximum(sink, -1.0e30)
    state = (tl.zeros([BLOCK_M, HEAD_DIM], tl.float32), top, tl.exp2(sink - top))
    if DECODE:  # one row sees all that is loaded: masking it all costs nothing beside the loads
        right = begin
        left = begin
    for start in tl.range(left, right, BLOCK_N):
        state = _attend(
            state, q, k_head_ptr, v_head_ptr, table_ptr, positions, window, start, first, last,
            stride_page, page_shift, scale, BLOCK_N, HEAD_DIM, KV_FP8, PLAIN, False,
        )  # fmt: skip
    # LEFT, then DIAGONAL, in one loop.
    num_left = tl.cdiv(left - begin, BLOCK_N)
    for index in tl.range(0, num_left + tl.cdiv(end - right, BLOCK_N)):
        start = tl.where(index < num_left, begin + index * BLOCK_N, right + (index - num_left) * BLOCK_N)
        state = _attend(
            state, q, k_head_ptr, v_head_ptr, table_ptr, positions, window, start, first, last,
            stride_page, page_shift, scale, BLOCK_N, HEAD_DIM, KV_FP8, PLAIN, True,
        )  # fmt: skip
    acc, top, total = state
    if KV_FP8:
        acc *= tl.load(v_scale_ptr + kv_head) * HALF_SHIFT
    if SPLIT:
        row = (query * (tl.num_programs(1) * group) + head) * num_splits + split
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + dims[None, :], acc, mask=row_valid[:, None])
        tl.store(summary_ptr + row * 2, top, mask=row_valid)
        tl.store(summary_ptr + row * 2 + 1, total, mask=row_valid)
    else:
        out = acc / total[:, None]
        offsets = (query * stride_out_token + head * HEAD_DIM)[:, None] + dims[None, :]
        tl.store(out_ptr + offsets, to_bf16(out, PLAIN), mask=row_valid[:, None])


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    partial_ptr, summary_ptr, out_ptr, num_splits, stride_out_token,
    HEAD_DIM: tl.constexpr, MAX_SPLITS: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, heads). Adds up the splits of one row, each weighted by its share of the softmax's sum."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, HEAD_DIM)
    mask = splits < num_splits
    row = (token * tl.num_programs(1) + head) * num_splits + splits
    top = tl.load(summary_ptr + row * 2, mask=mask, other=-1.0e30)
    total = tl.load(summary_ptr + row * 2 + 1, mask=mask, other=0.0)
    weight = tl.exp2(top - tl.max(top, axis=0))
    # A split without keys left its accumulator at zero and its total at zero: it adds nothing.
    acc = tl.load(partial_ptr + row[:, None] * HEAD_DIM + dims[None, :], mask=mask[:, None], other=0.0)
    out = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out_ptr + token * stride_out_token + head * HEAD_DIM + dims, to_bf16(out, PLAIN))
