"""The jit code of ``triton_paged`` for decoding steps: norms and rotation of the heads, KV write and attention in one.

Every sequence has one new token. Only what that token's heads are is the kernel before's; all else is older than the
step: lengths, tables, weights, and the keys and values of every position before the newest. So the first block of old
keys and values comes to registers *before* the wait, next to sine, cosine and weights, and at batch 1 that is the whole
split. (Old keys were written a step ago. Between two steps stands at least one launch that waits for all before it:
``pdl_jit``.)

The newest key and value never go through memory here. The program whose split ends with the newest position makes them
from ``qkv``, rounded as the cache holds them, stores them for later steps, which no kernel waits for, and begins the
softmax with them.

The tile that the queries come in has room for the key and the value: one row each behind the group's. So all of them
are loaded, normed and turned at once, and the same tile serves as a block of keys of which one is visible.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.attention.paged_jit import (
    HALF_SHIFT,
    LOG2E,
    add_values,
    find_slots,
    finish,
    load_rows,
    score,
    start_softmax,
    weigh,
)
from microscale.kernels.attention.split_kv_jit import find_work, prefetch_keys
from microscale.kernels.kv_codes_jit import to_codes
from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16
from microscale.kernels.small.fused_jit import turn, weigh_head


@triton.jit
def _half_columns(part: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """Those of ``columns(part)`` in the first half of a head. Column c turns with c + HEAD_DIM / 2."""
    if KV_FP8:
        return tl.arange(0, HEAD_DIM // 4) * 2 + part
    else:
        return tl.arange(0, HEAD_DIM // 2)


@triton.jit
def _rotation(position, frequencies_ptr, scale, part: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """Cosine and sine of a part's pairs of columns, ``[1, pairs]`` each."""
    angle = position.to(tl.float32) * tl.load(frequencies_ptr + _half_columns(part, HEAD_DIM, KV_FP8))
    return (tl.cos(angle) * scale)[None, :], (tl.sin(angle) * scale)[None, :]


@triton.jit
def _weights(q_ptr, k_ptr, is_key, mask, part: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """Weights of both columns of a part's pairs, ``[BLOCK_M, pairs]`` each: loaded as the heads are, so that they need
    no change of layout after the wait."""
    low = tl.where(is_key, k_ptr, q_ptr)[:, None] + _half_columns(part, HEAD_DIM, KV_FP8)[None, :]
    first = tl.load(low, mask[:, None], other=0.0)
    return first, tl.load(low + HEAD_DIM // 2, mask[:, None], other=0.0)


@triton.jit
def _load_heads(ptr, at, mask, part: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """A part of the heads at ``at [BLOCK_M]`` in float32: what stands in the first half, and in the second."""
    low = ptr + (at[:, None] + _half_columns(part, HEAD_DIM, KV_FP8)[None, :])
    first = tl.load(low, mask[:, None], other=0.0)
    second = tl.load(low + HEAD_DIM // 2, mask[:, None], other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def whole(first, second):
    """Both halves of a part side by side."""
    return tl.join(first, second).permute(0, 2, 1).reshape(first.shape[0], 2 * first.shape[1])


@triton.jit
def _shifted(halves, PLAIN: tl.constexpr):
    """Queries as they meet E4M3 keys."""
    first = to_bf16(halves[0].to(tl.float32) * HALF_SHIFT, PLAIN)
    return whole(first, to_bf16(halves[1].to(tl.float32) * HALF_SHIFT, PLAIN))


@triton.jit
def _turn(heads, weights, rotation, NORM: tl.constexpr, PLAIN: tl.constexpr):
    """One part of heads, weighted and turned, in bf16."""
    first, second = heads
    cos, sin = rotation
    if NORM:
        first = weigh_head(first, weights[0], PLAIN)
        second = weigh_head(second, weights[1], PLAIN)
    return turn(first, second, cos, -sin, PLAIN), turn(second, first, cos, sin, PLAIN)


@triton.jit
def _decode(code, PLAIN: tl.constexpr):
    """E4M3 codes → numbers times 2**-120, as ``load_rows`` gives them."""
    numbers = (((code & 0x7F) << 20) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
    if PLAIN:
        return numbers
    else:
        return numbers.to(tl.bfloat16)


@triton.jit
def _keep_codes(place, even, odd, scale, mask, PLAIN: tl.constexpr):
    low = tl.where(mask, to_codes(even, scale, PLAIN).to(tl.uint32), 0)
    high = tl.where(mask, to_codes(odd, scale, PLAIN).to(tl.uint32), 0)
    tl.store(place, (low | (high << 8)).to(tl.int16), mask=mask)
    return _decode(low, PLAIN), _decode(high, PLAIN)


@triton.jit
def _keep(cache_ptr, x, odd, scale_ptr, mask, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, PLAIN: tl.constexpr):
    """Store the row of ``x`` that ``mask [BLOCK_M, 1]`` shows, both halves in bf16, as the cache has it. → What later
    steps will read there, in parts as ``load_rows`` gives it, and zeros in the other rows."""
    HALF: tl.constexpr = HEAD_DIM // 4 if KV_FP8 else HEAD_DIM // 2
    place = cache_ptr + (tl.zeros_like(mask.to(tl.int32)) + tl.arange(0, HALF)[None, :])
    if KV_FP8:
        scale = tl.load(scale_ptr)
        first = _keep_codes(place, x[0], odd[0], scale, mask, PLAIN)
        second = _keep_codes(place + HALF, x[1], odd[1], scale, mask, PLAIN)
        return whole(first[0], second[0]), whole(first[1], second[1])
    else:
        tl.store(place, x[0], mask=mask)
        tl.store(place + HALF, x[1], mask=mask)
        return (whole(tl.where(mask, x[0], 0.0), tl.where(mask, x[1], 0.0)),)


@triton.jit
def _begin(state, q, k, v, is_key, is_value, scale, KV_FP8: tl.constexpr, PLAIN: tl.constexpr):
    """The running softmax after the newest key, of which ``is_key`` and ``is_value`` ``[BLOCK_M]`` show the row: in
    none, where it is another split's."""
    acc, top, total = state
    scores = score(q, k, KV_FP8, PLAIN) * scale
    newest = tl.max(tl.where(is_key[None, :], scores, float("-inf")), axis=1)
    new_top = tl.maximum(top, newest)
    shrink = tl.exp2(top - new_top)
    weight = tl.exp2(newest - new_top)
    acc = add_values(acc, tl.where(is_value[None, :], weight[:, None], 0.0), shrink, v, KV_FP8, PLAIN)
    return acc, new_top, total * shrink + weight


@triton.jit
def _attend_old(
    state, q, k_ptr, v_ptr, table_ptr, begin, end, stride_page, page_shift, scale,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Fold the BLOCK_N keys from ``begin`` on into the running softmax. A row's query sees all up to ``end``."""
    n = begin + tl.arange(0, BLOCK_N)
    valid = n < end
    slots = find_slots(table_ptr, n, valid, stride_page, page_shift, HEAD_DIM // 2 if KV_FP8 else HEAD_DIM, True)
    k = load_rows(k_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
    scores = tl.where(valid[None, :], score(q, k, KV_FP8, PLAIN), float("-inf"))
    weights, shrink, top, total = weigh(state, scores, scale)
    v = load_rows(v_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
    return add_values(state[0], weights, shrink, v, KV_FP8, PLAIN), top, total


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
def attend_fused(
    qkv_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr,
    query_start_ptr, context_lens_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, window, page_shift, group, wanted, least, scale,
    stride_qkv_token, stride_out_token, stride_page, stride_kv_head, stride_table, stride_scale,
    frequencies_ptr, q_weight_ptr, k_weight_ptr, rope_scale, epsilon,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KV_FP8: tl.constexpr, SPLIT: tl.constexpr,
    INSIDE: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr, NORM: tl.constexpr, NORM_V: tl.constexpr,
    SHARED: tl.constexpr,    PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """As ``attend_short`` for one new token each, from ``qkv [tokens, heads and KV heads, HEAD_DIM]``.

    NORM, NORM_V, SHARED: as ``rope_and_write_kv``. EARLY: the first block of a split comes to registers before the
    wait, and PREFETCH keys after it to L2; without EARLY the first of a split do.
    """
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    live, seq, split, first_program, splits, query_first, _, first, last, begin, end = find_work(
        query_start_ptr, context_lens_ptr, num_sequences, window, 1, wanted, least, BLOCK_N, SPLIT
    )
    newest = last - 1
    old_end = tl.minimum(end, newest)
    newest_here = live & (end == last)
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KV_FP8 else HEAD_DIM
    k_head_ptr = k_ptr + kv_head * stride_kv_head
    v_head_ptr = v_ptr + kv_head * stride_kv_head
    table_ptr = page_table_ptr + seq * stride_table
    loop_begin = begin
    if EARLY:
        n = begin + tl.arange(0, BLOCK_N)
        valid = (n < old_end) & live
        slots = find_slots(table_ptr, n, valid, stride_page, page_shift, WIDTH, True)
        early_k = load_rows(k_head_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
        if EARLY == 2:
            early_v = load_rows(v_head_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
        loop_begin += BLOCK_N
    if PREFETCH > 0:
        if live & (loop_begin < old_end):
            prefetch_keys(
                k_head_ptr, v_head_ptr, table_ptr, loop_begin, first, old_end, stride_page, page_shift, WIDTH, PREFETCH
            )
    rows = tl.arange(0, BLOCK_M)
    row_valid = rows < group
    is_key = (rows == group) & newest_here
    is_value = is_key if SHARED else (rows == group + 1) & newest_here
    needed = row_valid | is_key | is_value
    query = query_first.to(tl.int64)
    heads = kv_heads * group
    head = kv_head * group + rows
    at = tl.where(row_valid, head, heads + kv_head + tl.where(rows == group, 0, kv_heads)) * HEAD_DIM
    page = tl.load(table_ptr + (newest >> page_shift), mask=live, other=0).to(tl.int64)
    newest_at = page * stride_page + (newest & ((1 << page_shift) - 1)) * WIDTH
    rotation = _rotation(newest, frequencies_ptr, rope_scale, 0, HEAD_DIM, KV_FP8)
    norm_weights = 0
    if NORM:
        norm_weights = _weights(q_weight_ptr, k_weight_ptr, is_key, needed, 0, HEAD_DIM, KV_FP8)
    if KV_FP8:
        odd_rotation = _rotation(newest, frequencies_ptr, rope_scale, 1, HEAD_DIM, KV_FP8)
        odd_weights = 0
        if NORM:
            odd_weights = _weights(q_weight_ptr, k_weight_ptr, is_key, needed, 1, HEAD_DIM, KV_FP8)
    scale *= LOG2E
    if KV_FP8:
        scale *= tl.load(k_scale_ptr + kv_head * stride_scale) * HALF_SHIFT
    state = start_softmax(sinks_ptr, head, row_valid & (split == 0), BLOCK_M, HEAD_DIM, KV_FP8)
    if PDL:  # also who has nothing to do: whoever waits for this kernel must not overtake the one before
        let_next_begin_and_wait()
    if not live:
        return

    token_ptr = qkv_ptr + query * stride_qkv_token
    parts = _load_heads(token_ptr, at, needed, 0, HEAD_DIM, KV_FP8)
    if KV_FP8:
        odd = _load_heads(token_ptr, at, needed, 1, HEAD_DIM, KV_FP8)
    if NORM:
        squares = parts[0] * parts[0] + parts[1] * parts[1]
        if KV_FP8:
            squares += odd[0] * odd[0] + odd[1] * odd[1]
        squares = tl.sum(squares, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + epsilon)[:, None]
        if not NORM_V:
            factor = tl.where(is_value[:, None], 1.0, factor)
        parts = parts[0] * factor, parts[1] * factor
        if KV_FP8:
            odd = odd[0] * factor, odd[1] * factor
    turned = _turn(parts, norm_weights, rotation, NORM, PLAIN)
    plain = to_bf16(parts[0], PLAIN), to_bf16(parts[1], PLAIN)
    odd_turned = turned
    odd_plain = plain
    q = (whole(turned[0], turned[1]),)
    if KV_FP8:
        odd_turned = _turn(odd, odd_weights, odd_rotation, NORM, PLAIN)
        odd_plain = to_bf16(odd[0], PLAIN), to_bf16(odd[1], PLAIN)
        q = _shifted(turned, PLAIN), _shifted(odd_turned, PLAIN)
    k_scale_at = k_scale_ptr + kv_head * stride_scale
    v_scale_at = v_scale_ptr + kv_head * stride_scale
    k = _keep(k_head_ptr + newest_at, turned, odd_turned, k_scale_at, is_key[:, None], HEAD_DIM, KV_FP8, PLAIN)
    v = _keep(v_head_ptr + newest_at, plain, odd_plain, v_scale_at, is_value[:, None], HEAD_DIM, KV_FP8, PLAIN)
    if not KV_FP8:
        k = q  # one of whose rows it is
    state = _begin(state, q, k, v, is_key, is_value, scale, KV_FP8, PLAIN)

    if EARLY:
        scores = tl.where(valid[None, :], score(q, early_k, KV_FP8, PLAIN), float("-inf"))
        weights, shrink, top, total = weigh(state, scores, scale)
        if EARLY == 1:
            early_v = load_rows(v_head_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
        state = add_values(state[0], weights, shrink, early_v, KV_FP8, PLAIN), top, total
    for start in tl.range(loop_begin, old_end, BLOCK_N):
        state = _attend_old(
            state, q, k_head_ptr, v_head_ptr, table_ptr, start, old_end, stride_page, page_shift, scale,
            BLOCK_N, HEAD_DIM, KV_FP8, PLAIN,
        )  # fmt: skip
    finish(
        state, row_valid, query + tl.zeros_like(rows), head,
        out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr, v_scale_ptr, seq,
        split, first_program, splits, query_first, 1, group, stride_out_token, stride_scale,
        HEAD_DIM, BLOCK_M, KV_FP8, SPLIT, INSIDE, PLAIN,
    )  # fmt: skip
