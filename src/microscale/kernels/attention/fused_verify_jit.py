"""The jit code of ``triton_paged`` for steps that verify drafts: as ``fused_decode_jit``, for several new tokens.

The new tokens of a sequence are its next one and drafts. No program reads their keys and values from the cache: the
splits share the *old* keys, and the last split makes the new ones from ``qkv``, rounded as the cache holds them. It
stores them for later steps, with nobody waiting for that, and takes them as one more block of keys:

    positions of a sequence:   | never read |    split 0    |    split 1    | … | last split, and then |   new    |
                               0          first                                                   old_end       last

Old keys were written by an earlier step, so the first block of them comes to registers before the wait. Counted
without the new ones, a window of 128 is one block of 128.

Shapes are powers of two, so that all of a token's heads turn by the sines and cosines that are computed once a token:

    queries             [TOKENS, GROUP, pairs]          row r of BLOCK_M is token r // GROUP, head r % GROUP
    new keys, values    [NEW / TOKENS, TOKENS, pairs]   row r of NEW is token r; rows from TOKENS on are never visible
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.attention.fused_decode_jit import half_columns, keep, shifted, turn_heads, whole
from microscale.kernels.attention.paged_jit import (
    HALF_SHIFT,
    LOG2E,
    add_values,
    dot,
    find_slots,
    finish,
    load_rows,
    score,
    start_softmax,
    weigh,
)
from microscale.kernels.attention.split_kv_jit import find_work, prefetch_keys
from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16

# Rows of the new keys' tile, at least: of a matrix instruction, whose K is as much for the values.
FEWEST_NEW = tl.constexpr(16)


@triton.jit
def _rotation(positions, frequencies_ptr, scale, part: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """Cosine and sine of a part's pairs of columns, ``[tokens, pairs]`` each."""
    frequencies = tl.load(frequencies_ptr + half_columns(part, HEAD_DIM, KV_FP8))
    angle = positions.to(tl.float32)[:, None] * frequencies[None, :]
    return tl.cos(angle) * scale, tl.sin(angle) * scale


@triton.jit
def _weights(ptr, part: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """A norm's weights of both columns of a part's pairs, ``[1, 1, pairs]`` each."""
    low = ptr + half_columns(part, HEAD_DIM, KV_FP8)
    return tl.load(low)[None, None, :], tl.load(low + HEAD_DIM // 2)[None, None, :]


@triton.jit
def _load_heads(ptr, at, mask, part: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """A part of the heads at ``at [a, b, 1]`` in float32: what stands in the first half, and in the second."""
    low = ptr + (at + half_columns(part, HEAD_DIM, KV_FP8)[None, None, :])
    first = tl.load(low, mask, other=0.0)
    second = tl.load(low + HEAD_DIM // 2, mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _norm_factor(even, odd, epsilon, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr):
    """What norms each of the heads: ``[a, b, 1]``."""
    squares = even[0] * even[0] + even[1] * even[1]
    if KV_FP8:
        squares += odd[0] * odd[0] + odd[1] * odd[1]
    return tl.rsqrt(tl.sum(squares, axis=2) / HEAD_DIM + epsilon)[:, :, None]


@triton.jit
def _flat(halves):
    """``[a, b, pairs]`` → ``[a * b, pairs]``."""
    ROWS: tl.constexpr = halves[0].shape[0] * halves[0].shape[1]
    return halves[0].reshape(ROWS, halves[0].shape[2]), halves[1].reshape(ROWS, halves[1].shape[2])


@triton.jit
def _plain(halves, PLAIN: tl.constexpr):
    return to_bf16(halves[0], PLAIN), to_bf16(halves[1], PLAIN)


@triton.jit
def _begin(state, q, k, v, visible, scale, KV_FP8: tl.constexpr, PLAIN: tl.constexpr):
    """As ``_add_block``, for the first of all, before which the sums of values are zero.

    They are not shrunk. Zero times a row's factor is one number for all of its columns, and LLVM copies that to the
    accumulators after the fence of the ``wgmma`` that adds to them, which leaves their content undefined (Triton 3.7).
    """
    scores = tl.where(visible, score(q, k, KV_FP8, PLAIN), float("-inf"))
    weights, _, top, total = weigh(state, scores, scale)
    if KV_FP8:
        weights = to_bf16(weights * HALF_SHIFT, PLAIN)
        return (dot(weights, v[0], PLAIN), dot(weights, v[1], PLAIN)), top, total
    else:
        return (dot(to_bf16(weights, PLAIN), v[0], PLAIN),), top, total


@triton.jit
def _add_block(state, q, k, v, visible, scale, KV_FP8: tl.constexpr, PLAIN: tl.constexpr):
    """Fold a block of keys into the running softmax; ``visible`` is for each row and key."""
    scores = tl.where(visible, score(q, k, KV_FP8, PLAIN), float("-inf"))
    weights, shrink, top, total = weigh(state, scores, scale)
    return add_values(state[0], weights, shrink, v, KV_FP8, PLAIN), top, total


@triton.jit
def _attend_old(
    state, q, k_ptr, v_ptr, table_ptr, positions, window, begin, end, stride_page, page_shift, scale,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, KV_FP8: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Fold the BLOCK_N keys from ``begin`` on into the running softmax. All are before the new tokens."""
    n = begin + tl.arange(0, BLOCK_N)
    valid = n < end
    slots = find_slots(table_ptr, n, valid, stride_page, page_shift, HEAD_DIM // 2 if KV_FP8 else HEAD_DIM, True)
    k = load_rows(k_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
    v = load_rows(v_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
    return _add_block(state, q, k, v, valid[None, :] & (n[None, :] > positions[:, None] - window), scale, KV_FP8, PLAIN)


@triton.jit(
    do_not_specialize=["num_sequences", "window", "page_shift", "wanted", "least", "stride_scale", "stride_table"]
)
def attend_verify(
    qkv_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr,
    query_start_ptr, context_lens_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, window, page_shift, wanted, least, scale,
    stride_qkv_token, stride_out_token, stride_page, stride_kv_head, stride_table, stride_scale,
    frequencies_ptr, q_weight_ptr, k_weight_ptr, rope_scale, epsilon,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KV_FP8: tl.constexpr,
    SPLIT: tl.constexpr, INSIDE: tl.constexpr, PREFETCH: tl.constexpr, EARLY: tl.constexpr, NORM: tl.constexpr,
    NORM_V: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """As ``attend_fused``, for up to ``BLOCK_M / GROUP`` new tokens of a sequence, which may differ in number."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    NEW: tl.constexpr = max(TOKENS, FEWEST_NEW)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    live, seq, split, first_program, splits, query_first, query_len, first, last, begin, end = find_work(
        query_start_ptr, context_lens_ptr, num_sequences, window, TOKENS, wanted, least, BLOCK_N, SPLIT, True
    )
    first_new = last - query_len
    WIDTH: tl.constexpr = HEAD_DIM // 2 if KV_FP8 else HEAD_DIM
    k_head_ptr = k_ptr + kv_head * stride_kv_head
    v_head_ptr = v_ptr + kv_head * stride_kv_head
    table_ptr = page_table_ptr + seq * stride_table
    loop_begin = begin
    if EARLY:
        n = begin + tl.arange(0, BLOCK_N)
        valid = (n < end) & live
        slots = find_slots(table_ptr, n, valid, stride_page, page_shift, WIDTH, True)
        early_k = load_rows(k_head_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
        if EARLY == 2:
            early_v = load_rows(v_head_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
        loop_begin += BLOCK_N
    if PREFETCH > 0:
        if live & (loop_begin < end):
            prefetch_keys(
                k_head_ptr, v_head_ptr, table_ptr, loop_begin, first, end, stride_page, page_shift, WIDTH, PREFETCH
            )
    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    row_valid = (token < query_len) & live
    positions = first_new + token
    head = kv_head * GROUP + rows % GROUP
    tokens = tl.arange(0, TOKENS)
    query = query_first.to(tl.int64) + tokens
    # Which of the tile of new keys are there, and are this program's.
    new = tl.arange(0, NEW)
    num_new = tl.where(live & (split == splits - 1), query_len, 0)
    is_new = new < num_new
    new_slots = find_slots(table_ptr, first_new + new, is_new, stride_page, page_shift, WIDTH, True)
    rotation = _rotation(first_new + tokens, frequencies_ptr, rope_scale, 0, HEAD_DIM, KV_FP8)
    q_rotation = rotation[0][:, None, :], rotation[1][:, None, :]
    k_rotation = rotation[0][None, :, :], rotation[1][None, :, :]
    q_weights = 0
    k_weights = 0
    if NORM:
        q_weights = _weights(q_weight_ptr, 0, HEAD_DIM, KV_FP8)
        k_weights = _weights(k_weight_ptr, 0, HEAD_DIM, KV_FP8)
    if KV_FP8:
        odd_rotation = _rotation(first_new + tokens, frequencies_ptr, rope_scale, 1, HEAD_DIM, KV_FP8)
        odd_q_rotation = odd_rotation[0][:, None, :], odd_rotation[1][:, None, :]
        odd_k_rotation = odd_rotation[0][None, :, :], odd_rotation[1][None, :, :]
        odd_q_weights = 0
        odd_k_weights = 0
        if NORM:
            odd_q_weights = _weights(q_weight_ptr, 1, HEAD_DIM, KV_FP8)
            odd_k_weights = _weights(k_weight_ptr, 1, HEAD_DIM, KV_FP8)
    scale *= LOG2E
    if KV_FP8:
        scale *= tl.load(k_scale_ptr + kv_head * stride_scale) * HALF_SHIFT
    state = start_softmax(sinks_ptr, head, row_valid & (split == 0), BLOCK_M, HEAD_DIM, KV_FP8)
    if PDL:  # also who has nothing to do: whoever waits for this kernel must not overtake the one before
        let_next_begin_and_wait()
    if not live:
        return

    q_heads = (kv_head * GROUP + tl.arange(0, GROUP)) * HEAD_DIM
    q_at = (query * stride_qkv_token)[:, None, None] + q_heads[None, :, None]
    q_mask = (tokens < query_len)[:, None, None]
    place = tl.arange(0, NEW // TOKENS)[:, None, None] * TOKENS + tokens[None, :, None]
    k_at = (query * stride_qkv_token)[None, :, None] + (kv_heads * GROUP + kv_head) * HEAD_DIM
    v_at = k_at + kv_heads * HEAD_DIM
    k_mask = place < num_new
    q_even = _load_heads(qkv_ptr, q_at, q_mask, 0, HEAD_DIM, KV_FP8)
    k_even = _load_heads(qkv_ptr, k_at, k_mask, 0, HEAD_DIM, KV_FP8)
    v_even = k_even if SHARED else _load_heads(qkv_ptr, v_at, k_mask, 0, HEAD_DIM, KV_FP8)
    q_odd = q_even
    k_odd = k_even
    v_odd = v_even
    if KV_FP8:
        q_odd = _load_heads(qkv_ptr, q_at, q_mask, 1, HEAD_DIM, KV_FP8)
        k_odd = _load_heads(qkv_ptr, k_at, k_mask, 1, HEAD_DIM, KV_FP8)
        v_odd = k_odd if SHARED else _load_heads(qkv_ptr, v_at, k_mask, 1, HEAD_DIM, KV_FP8)
    if NORM:
        q_factor = _norm_factor(q_even, q_odd, epsilon, HEAD_DIM, KV_FP8)
        k_factor = _norm_factor(k_even, k_odd, epsilon, HEAD_DIM, KV_FP8)
        if NORM_V:
            v_factor = k_factor if SHARED else _norm_factor(v_even, v_odd, epsilon, HEAD_DIM, KV_FP8)
            v_even = v_even[0] * v_factor, v_even[1] * v_factor
            v_odd = v_odd[0] * v_factor, v_odd[1] * v_factor
        q_even = q_even[0] * q_factor, q_even[1] * q_factor
        k_even = k_even[0] * k_factor, k_even[1] * k_factor
        q_odd = q_odd[0] * q_factor, q_odd[1] * q_factor
        k_odd = k_odd[0] * k_factor, k_odd[1] * k_factor
    q_turned = _flat(turn_heads(q_even, q_weights, q_rotation, NORM, PLAIN))
    k_turned = _flat(turn_heads(k_even, k_weights, k_rotation, NORM, PLAIN))
    v_plain = _flat(_plain(v_even, PLAIN))
    odd_k_turned = k_turned
    odd_v_plain = v_plain
    q = (whole(q_turned[0], q_turned[1]),)
    if KV_FP8:
        odd_q_turned = _flat(turn_heads(q_odd, odd_q_weights, odd_q_rotation, NORM, PLAIN))
        odd_k_turned = _flat(turn_heads(k_odd, odd_k_weights, odd_k_rotation, NORM, PLAIN))
        odd_v_plain = _flat(_plain(v_odd, PLAIN))
        q = shifted(q_turned, PLAIN), shifted(odd_q_turned, PLAIN)
    k_scale_at = k_scale_ptr + kv_head * stride_scale
    v_scale_at = v_scale_ptr + kv_head * stride_scale
    k_place = k_head_ptr + new_slots[:, None]
    v_place = v_head_ptr + new_slots[:, None]
    k = keep(k_place, k_turned, odd_k_turned, k_scale_at, is_new[:, None], HEAD_DIM, KV_FP8, PLAIN)
    v = keep(v_place, v_plain, odd_v_plain, v_scale_at, is_new[:, None], HEAD_DIM, KV_FP8, PLAIN)
    visible = is_new[None, :] & (new[None, :] <= token[:, None]) & (new[None, :] > token[:, None] - window)
    state = _begin(state, q, k, v, visible, scale, KV_FP8, PLAIN)

    if EARLY:
        if EARLY == 1:
            early_v = load_rows(v_head_ptr, slots, valid, HEAD_DIM, KV_FP8, PLAIN, True)
        visible = valid[None, :] & (n[None, :] > positions[:, None] - window)
        state = _add_block(state, q, early_k, early_v, visible, scale, KV_FP8, PLAIN)
    for start in tl.range(loop_begin, end, BLOCK_N):
        state = _attend_old(
            state, q, k_head_ptr, v_head_ptr, table_ptr, positions, window, start, end, stride_page, page_shift, scale,
            BLOCK_N, HEAD_DIM, KV_FP8, PLAIN,
        )  # fmt: skip
    finish(
        state, row_valid, query_first.to(tl.int64) + token, head,
        out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr, v_scale_ptr, seq,
        split, first_program, splits, query_first, query_len, GROUP, stride_out_token, stride_scale,
        HEAD_DIM, BLOCK_M, KV_FP8, SPLIT, INSIDE, PLAIN,
    )  # fmt: skip
