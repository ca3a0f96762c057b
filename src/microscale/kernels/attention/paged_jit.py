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

A sequence is *short* when all its new rows fit one block: one new token, or two. ``attend_short`` cuts its keys into
splits, about as many in all as the machine runs at once, however the lengths differ: every program reads the lengths
and finds its split by itself. ``merge_splits`` adds them up, always in the same order. A merge by the last program to
finish, in the same launch, was slower: 25 µs and not 13 for one sequence of 8192 on H200, where one program per KV head
reads what here one per query head does. It is for few splits only (INSIDE, ``split_kv_jit``). ``attend_long`` takes the
other sequences, block of rows by block of rows.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
import triton
import triton.language as tl

from microscale.kernels.attention.split_kv_jit import find_work, merge_in_place, prefetch_keys
from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16

LOG2E = tl.constexpr(1.4426950408889634)
# E4M3 bits moved into bf16 are 2**120 too small. Half of that is put on the other operand, half on the result: both
# stay far from the ends of bf16.
HALF_SHIFT = tl.constexpr(2.0**60)


@triton.jit
def _e4m3_to_bf16(x, PLAIN: tl.constexpr):
    """16-bit words of two E4M3 numbers → the lower and the upper ones as bf16 times 2**-120, by bits: exact on every
    GPU, subnormals included. NaN is not kept."""
    if PLAIN:  # the interpreter misreads subnormal bf16: float32, which holds the same numbers
        word = x.to(tl.uint32)
        low = (((word & 0x7F) << 20) | ((word & 0x80) << 24)).to(tl.float32, bitcast=True)
        high = (((word & 0x7F00) << 12) | ((word & 0x8000) << 16)).to(tl.float32, bitcast=True)
    else:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d;
            shl.b32 a, $2, 8;
            shl.b32 b, $2, 4;
            and.b32 a, a, 0x80008000;
            lop3.b32 $0, b, 0x07F007F0, a, 0xEA;
            shr.b32 c, $2, 4;
            and.b32 d, $2, 0x80008000;
            lop3.b32 $1, c, 0x07F007F0, d, 0xEA;
            }
            """,
            "=&r,=&r,r",
            [x],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def columns(part: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """The places in a head of what stands in part 0 or, for E4M3, of the even and of the odd ones."""
    if KV_FP8:
        return tl.arange(0, HEAD_DIM // 2) * 2 + part
    else:
        return tl.arange(0, HEAD_DIM)


@triton.jit
def find_slots(table_ptr, n, valid, stride_page, page_shift, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Where positions ``n`` of a sequence lie within one KV head: ``[BLOCK_N]`` element offsets."""
    if MASKED:
        page = tl.load(table_ptr + (n >> page_shift), mask=valid, other=0).to(tl.int64)
    else:
        page = tl.load(table_ptr + (n >> page_shift)).to(tl.int64)
    return page * stride_page + (n & ((1 << page_shift) - 1)) * WIDTH


@triton.jit
def load_rows(
    ptr, slots, valid, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr
):
    """Keys or values in bf16, in parts ``[BLOCK_N, width]``; zeros where not ``valid`` if MASKED."""
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KV_FP8 else HEAD_DIM
    pointers = ptr + slots[:, None] + tl.arange(0, WIDTH)[None, :]
    if MASKED:
        rows = tl.load(pointers, mask=valid[:, None], other=0)
    else:
        rows = tl.load(pointers)
    if KV_FP8:
        return _e4m3_to_bf16(rows, PLAIN)
    else:
        return (rows,)


@triton.jit
def dot(a, b, PLAIN: tl.constexpr):
    """``a @ b`` in float32. PLAIN is for Triton's interpreter, which multiplies the bits of bf16 operands."""
    if PLAIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def score(q, k, KV_FP8: tl.constexpr, PLAIN: tl.constexpr):
    scores = dot(q[0], tl.trans(k[0]), PLAIN)
    if KV_FP8:
        scores += dot(q[1], tl.trans(k[1]), PLAIN)
    return scores


@triton.jit
def weigh(state, scores, scale):
    """Weights of a block of keys, how the sums before it shrink, and the new top and total."""
    _, top, total = state
    # Scaled in the subtraction, one instruction: for heads of 64 the softmax takes as long as the products.
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    weights = tl.exp2(scores * scale - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def add_values(acc, weights, shrink, v, KV_FP8: tl.constexpr, PLAIN: tl.constexpr):
    if KV_FP8:
        weights = to_bf16(weights * HALF_SHIFT, PLAIN)
        low = acc[0] * shrink[:, None] + dot(weights, v[0], PLAIN)
        return low, acc[1] * shrink[:, None] + dot(weights, v[1], PLAIN)
    else:
        return (acc[0] * shrink[:, None] + dot(to_bf16(weights, PLAIN), v[0], PLAIN),)


@triton.jit
def attend_block(
    state, q, k_ptr, v_ptr, table_ptr, positions, window, begin, first, last, stride_page, page_shift, scale,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, PLAIN: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the BLOCK_N keys from ``begin`` on into the running softmax ``(acc, top, total)``; ``q`` and ``acc`` are in
    parts, as the keys are."""
    n = begin + tl.arange(0, BLOCK_N)
    # A value outside first..last may be NaN from a page that was freed or never written, and 0 * NaN is NaN.
    valid = (n >= first) & (n < last)
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KV_FP8 else HEAD_DIM
    slots = find_slots(table_ptr, n, valid, stride_page, page_shift, WIDTH, MASKED)
    k = load_rows(k_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, MASKED)
    scores = score(q, k, KV_FP8, PLAIN)
    if MASKED:
        visible = (n[None, :] <= positions[:, None]) & (n[None, :] > positions[:, None] - window) & valid[None, :]
        scores = tl.where(visible, scores, float("-inf"))
    weights, shrink, top, total = weigh(state, scores, scale)
    v = load_rows(v_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, MASKED)
    return add_values(state[0], weights, shrink, v, KV_FP8, PLAIN), top, total


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


@triton.jit
def _load_queries(
    q_ptr, query, head, row_valid, stride_q_token, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, PLAIN: tl.constexpr
):
    """In parts, as the keys are."""
    at = (query * stride_q_token + head * HEAD_DIM)[:, None]
    q = tl.load(q_ptr + (at + columns(0, HEAD_DIM, KV_FP8)[None, :]), row_valid[:, None], other=0.0)
    if KV_FP8:
        odd = tl.load(q_ptr + (at + columns(1, HEAD_DIM, KV_FP8)[None, :]), row_valid[:, None], other=0.0)
        return to_bf16(q.to(tl.float32) * HALF_SHIFT, PLAIN), to_bf16(odd.to(tl.float32) * HALF_SHIFT, PLAIN)
    else:
        return (q,)


@triton.jit
def _store_rows(ptr, at, acc, factor, mask, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, PLAIN: tl.constexpr):
    """``acc``, whose parts are ``[BLOCK_M, width]``, times ``factor [BLOCK_M]`` to rows at ``at [BLOCK_M]``, as wide as
    ``ptr`` says."""
    for part in tl.static_range(2 if KV_FP8 else 1):
        values = acc[part] * factor[:, None]
        if ptr.dtype.element_ty == tl.bfloat16:
            values = to_bf16(values, PLAIN)
        tl.store(ptr + (at[:, None] + columns(part, HEAD_DIM, KV_FP8)[None, :]), values, mask=mask[:, None])


@triton.jit
def start_softmax(sinks_ptr, head, mask, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """The running softmax before any key: the sink takes part as a key without a value."""
    sink = tl.load(sinks_ptr + head, mask=mask, other=float("-inf")).to(tl.float32) * LOG2E
    top = tl.maximum(sink, -1.0e30)
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KV_FP8 else HEAD_DIM
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if KV_FP8:
        return (acc, acc), top, tl.exp2(sink - top)
    else:
        return (acc,), top, tl.exp2(sink - top)


@triton.jit
def finish(
    state, row_valid, query, head, out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr, v_scale_ptr, seq,
    split, first_program, splits, query_first, query_len, group, stride_out_token, stride_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, KV_FP8: tl.constexpr, SPLIT: tl.constexpr, INSIDE: tl.constexpr,
    PLAIN: tl.constexpr, PARTS: tl.constexpr = 1,
):  # fmt: skip
    """The answer of a sequence in one split, or this split of it for the merge, which the last program does itself if
    INSIDE. PARTS: programs that share a sequence's tokens, as if each had a KV head of its own."""
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    rows = tl.arange(0, BLOCK_M)
    acc, top, total = state
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if KV_FP8:  # not before the loop, where it would take a register from 128 that are all in use
        factor *= tl.load(v_scale_ptr + kv_head * stride_scale) * HALF_SHIFT
    if SPLIT:
        if not INSIDE:
            if (split == 0) & (kv_head == 0):
                tl.store(spans_ptr + 2 * seq, first_program)
                tl.store(spans_ptr + 2 * seq + 1, splits)
        if splits > 1:
            row = (tl.program_id(0) * kv_heads + kv_head) * BLOCK_M + rows
            _store_rows(partial_ptr, row * HEAD_DIM, acc, factor, row_valid, HEAD_DIM, KV_FP8, PLAIN)
            tl.store(summary_ptr + row * 2, top, mask=row_valid)
            tl.store(summary_ptr + row * 2 + 1, total, mask=row_valid)
            if INSIDE:
                counter = counters_ptr + seq * kv_heads + kv_head
                # The barrier puts every thread's stores before the one thread that counts, and that one releases them.
                tl.debug_barrier()
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1:
                    tl.store(counter, 0)
                    merge_in_place(
                        partial_ptr, summary_ptr, out_ptr, first_program, splits, kv_head, kv_heads, query_first,
                        query_len * group, kv_head // PARTS * group, group, stride_out_token, HEAD_DIM, BLOCK_M, PLAIN,
                    )  # fmt: skip
        row_valid = row_valid & (splits == 1)
    at = query * stride_out_token + head * HEAD_DIM
    _store_rows(out_ptr, at, acc, factor / total, row_valid, HEAD_DIM, KV_FP8, PLAIN)


@triton.jit(
    do_not_specialize=[
        "num_sequences",
        "window",
        "page_shift",
        "group",
        "wanted",
        "least",
        "stride_scale",
        "stride_table",
    ]
)
def attend_short(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr,
    query_start_ptr, context_lens_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, window, page_shift, group, wanted, least, scale,
    stride_q_token, stride_out_token, stride_page, stride_kv_head, stride_table, stride_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KV_FP8: tl.constexpr, SPLIT: tl.constexpr,
    INSIDE: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (splits, KV heads) if SPLIT, else (sequences, KV heads): then a program takes all keys of a sequence.

    A sequence in one split is done here. The splits of others go to ``partial`` and ``summary``, and where they begin
    and how many they are to ``spans [sequences, 2]``. If INSIDE, the last program of a sequence and a KV head adds them
    up, by ``counters [sequences, KV heads]``. PREFETCH: keys of a split that are fetched to L2 before the wait.
    """
    kv_head = tl.program_id(1)
    # Lengths and tables come with the step, sinks and scales with the model: all are older than the kernel before,
    # which only makes queries and keys.
    live, seq, split, first_program, splits, query_first, query_len, first, last, begin, end = find_work(
        query_start_ptr, context_lens_ptr, num_sequences, window, BLOCK_M // group, wanted, least, BLOCK_N, SPLIT
    )
    k_head_ptr = k_ptr + kv_head * stride_kv_head
    v_head_ptr = v_ptr + kv_head * stride_kv_head
    table_ptr = page_table_ptr + seq * stride_table
    if PREFETCH > 0:
        if live:
            WIDTH: tl.constexpr = HEAD_DIM // 2 if KV_FP8 else HEAD_DIM
            prefetch_keys(
                k_head_ptr, v_head_ptr, table_ptr, begin, first, end, stride_page, page_shift, WIDTH, PREFETCH
            )
    rows = tl.arange(0, BLOCK_M)
    token = rows // group
    row_valid = token < query_len
    head = kv_head * group + rows % group
    # Rows past the end compute like the last token, so that the masks stay simple; they are not stored.
    positions = last - query_len + tl.minimum(token, query_len - 1)
    query = (query_first + token).to(tl.int64)
    scale *= LOG2E
    if KV_FP8:
        scale *= tl.load(k_scale_ptr + kv_head * stride_scale) * HALF_SHIFT
    state = start_softmax(sinks_ptr, head, row_valid & (split == 0), BLOCK_M, HEAD_DIM, KV_FP8)
    if PDL:  # also who has nothing to do: whoever waits for this kernel must not overtake the one before
        let_next_begin_and_wait()
    if not live:
        return

    q = _load_queries(q_ptr, query, head, row_valid, stride_q_token, HEAD_DIM, KV_FP8, PLAIN)
    for start in tl.range(begin, end, BLOCK_N):  # all masked: that costs nothing beside the loads
        state = attend_block(
            state, q, k_head_ptr, v_head_ptr, table_ptr, positions, window, start, first, last,
            stride_page, page_shift, scale, BLOCK_N, HEAD_DIM, KV_FP8, PLAIN, True,
        )  # fmt: skip
    finish(
        state, row_valid, query, head, out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr, v_scale_ptr, seq,
        split, first_program, splits, query_first, query_len, group, stride_out_token, stride_scale,
        HEAD_DIM, BLOCK_M, KV_FP8, SPLIT, INSIDE, PLAIN,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_sequences", "window", "page_shift", "group", "short_len", "stride_scale", "stride_table"]
)
def attend_long(
    q_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr,
    query_start_ptr, context_lens_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, window, page_shift, group, short_len, scale,
    stride_q_token, stride_out_token, stride_page, stride_kv_head, stride_table, stride_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KV_FP8: tl.constexpr, SCALED: tl.constexpr,
    PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (query blocks, KV heads). Sequences of up to ``short_len`` new tokens are left to ``attend_short``.

    SCALED: keys and values are the numbers of E4M3 codes in bf16 (``widen_jit``), and have the codes' scales.
    """
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    block_q = BLOCK_M // group
    seq = _find_sequence(query_start_ptr, num_sequences, block, block_q)
    query_first = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_first
    context_len = tl.load(context_lens_ptr + seq)
    token_first = (block - query_first // block_q - seq) * block_q
    if (token_first >= query_len) | (query_len <= short_len):
        return

    rows = tl.arange(0, BLOCK_M)
    token = token_first + rows // group
    row_valid = (rows // group < block_q) & (token < query_len)
    head = kv_head * group + rows % group
    # Rows past the end compute like the last token, so that the masks below stay simple; they are not stored.
    positions = context_len - query_len + tl.minimum(token, query_len - 1)
    query = (query_first + token).to(tl.int64)
    q = _load_queries(q_ptr, query, head, row_valid, stride_q_token, HEAD_DIM, KV_FP8, PLAIN)

    position_first = context_len - query_len + token_first
    last = tl.minimum(position_first + block_q, context_len)
    first = tl.maximum(position_first - window + 1, 0)
    begin = first // BLOCK_N * BLOCK_N
    # FREE: every row sees the key. Its first block is past the last row's window's start, its end is at the first row.
    left = tl.maximum(tl.cdiv(tl.maximum(last - window, 0), BLOCK_N) * BLOCK_N, begin)
    right = tl.minimum((position_first + 1) // BLOCK_N * BLOCK_N, last)
    left = tl.minimum(left, last)
    right = tl.maximum(right, left)

    scale *= LOG2E
    if KV_FP8:
        scale *= tl.load(k_scale_ptr + kv_head * stride_scale) * HALF_SHIFT
    if SCALED:
        scale *= tl.load(k_scale_ptr + kv_head * stride_scale)
    k_head_ptr = k_ptr + kv_head * stride_kv_head
    v_head_ptr = v_ptr + kv_head * stride_kv_head
    table_ptr = page_table_ptr + seq * stride_table
    state = start_softmax(sinks_ptr, head, row_valid, BLOCK_M, HEAD_DIM, KV_FP8)
    for start in tl.range(left, right, BLOCK_N):
        state = attend_block(
            state, q, k_head_ptr, v_head_ptr, table_ptr, positions, window, start, first, last,
            stride_page, page_shift, scale, BLOCK_N, HEAD_DIM, KV_FP8, PLAIN, False,
        )  # fmt: skip
    # LEFT, then DIAGONAL, in one loop.
    num_left = tl.cdiv(left - begin, BLOCK_N)
    for index in tl.range(0, num_left + tl.cdiv(last - right, BLOCK_N)):
        start = tl.where(index < num_left, begin + index * BLOCK_N, right + (index - num_left) * BLOCK_N)
        state = attend_block(
            state, q, k_head_ptr, v_head_ptr, table_ptr, positions, window, start, first, last,
            stride_page, page_shift, scale, BLOCK_N, HEAD_DIM, KV_FP8, PLAIN, True,
        )  # fmt: skip
    acc, _, total = state
    factor = 1 / total
    if KV_FP8:
        factor *= tl.load(v_scale_ptr + kv_head * stride_scale) * HALF_SHIFT
    if SCALED:
        factor *= tl.load(v_scale_ptr + kv_head * stride_scale)
    at = query * stride_out_token + head * HEAD_DIM
    _store_rows(out_ptr, at, acc, factor, row_valid, HEAD_DIM, KV_FP8, PLAIN)
