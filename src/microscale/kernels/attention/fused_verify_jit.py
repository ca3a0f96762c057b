"""The jit code of ``triton_paged`` for steps that verify drafts: as ``fused_decode_jit``, for several new tokens. Keys
and values are in bf16 and heads have no norms: with others one launch is slower than two (``docs/lab/drafts.md``).

The new tokens of a sequence are its next one and drafts. No program reads their keys and values from the cache: the
splits share the *old* keys, and the last split makes the new ones from ``qkv``, rounded as the cache holds them. It
stores them for later steps, with no kernel waiting for that, and takes them as one more block of keys:

    positions of a sequence:   | never read |    split 0    |    split 1    | … | last split, and then |   new    |
                               0          first                                                   old_end       last

Old keys were written by an earlier step, so the first block of them comes to registers before the wait. Counted
without the new ones, a window of 128 is one block of 128.

A sequence's new tokens may be shared among PARTS programs of each KV head: more of the machine works, and each has
fewer rows to turn and to add up. Every part reads all old keys and makes all new ones, and stores those of its tokens.

Shapes are powers of two, so that all of a token's heads turn by the sines and cosines that are computed once a token:

    queries             [TOKENS, GROUP, pairs]    row r of BLOCK_M is the part's token r // GROUP, head r % GROUP
    new keys, values    [1, NEW, pairs]           row r of NEW is the sequence's new token r
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.attention.fused_decode_jit import whole
from microscale.kernels.attention.paged_jit import (
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
from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16
from microscale.kernels.small.fused_jit import turn

# Rows of the new keys' tile, at least: of a matrix instruction, whose K is as much for the values.
FEWEST_NEW = tl.constexpr(16)


@triton.jit
def _load_heads(ptr, at, mask, HALF: tl.constexpr):
    """The heads at ``at [a, b, 1]`` in float32: both halves, ``[a, b, HALF]`` each, and zeros where not ``mask``."""
    low = ptr + (at + tl.arange(0, HALF)[None, None, :])
    first = tl.load(low, mask, other=0.0)
    second = tl.load(low + HALF, mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _flat(x):
    """``[a, b, HALF]`` → ``[a * b, HALF]``."""
    return x.reshape(x.shape[0] * x.shape[1], x.shape[2])


@triton.jit
def _rotation(positions, frequencies, scale):
    """Cosine and sine of each pair of columns, ``[positions, pairs]`` each."""
    angle = positions.to(tl.float32)[:, None] * frequencies
    return tl.cos(angle) * scale, tl.sin(angle) * scale


@triton.jit
def _turned(heads, cos, sin, PLAIN: tl.constexpr):
    """Both halves of heads, turned, in bf16."""
    first, second = heads
    return _flat(turn(first, second, cos, -sin, PLAIN)), _flat(turn(second, first, cos, sin, PLAIN))


@triton.jit
def _keep(place, halves, mask, HALF: tl.constexpr):
    """Store new keys or values at ``place [NEW, 1]``. → As ``load_rows`` gives them."""
    low = place + tl.arange(0, HALF)[None, :]
    tl.store(low, halves[0], mask=mask)
    tl.store(low + HALF, halves[1], mask=mask)
    return (whole(halves[0], halves[1]),)


@triton.jit
def _add_block(state, q, k, v, visible, scale, PLAIN: tl.constexpr):
    """Fold a block of keys into the running softmax; ``visible`` is for each row and key."""
    scores = tl.where(visible, score(q, k, False, PLAIN), float("-inf"))
    weights, shrink, top, total = weigh(state, scores, scale)
    return add_values(state[0], weights, shrink, v, False, PLAIN), top, total


@triton.jit(
    do_not_specialize=["num_sequences", "window", "page_shift", "wanted", "least", "stride_scale", "stride_table"]
)
def attend_verify(
    qkv_ptr, k_ptr, v_ptr, sinks_ptr, out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr,
    query_start_ptr, context_lens_ptr, page_table_ptr, k_scale_ptr, v_scale_ptr,
    num_sequences, window, page_shift, wanted, least, scale,
    stride_qkv_token, stride_out_token, stride_page, stride_kv_head, stride_table, stride_scale,
    frequencies_ptr, rope_scale,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    INSIDE: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """As ``attend_fused``, for up to ``PARTS * BLOCK_M / GROUP`` new tokens of a sequence, which may differ in number.
    Grid: (programs, KV heads times PARTS).

    The first block of a split comes to registers before the wait, and PREFETCH keys after it to L2.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    NEW: tl.constexpr = max(TOKENS * PARTS, FEWEST_NEW)
    HALF: tl.constexpr = HEAD_DIM // 2
    kv_head = tl.program_id(1) // PARTS
    kv_heads = tl.num_programs(1) // PARTS
    live, seq, split, first_program, splits, query_first, query_len, first, last, begin, end = find_work(
        query_start_ptr, context_lens_ptr, num_sequences, window, TOKENS * PARTS, wanted, least, BLOCK_N, SPLIT, True
    )
    first_token = tl.program_id(1) % PARTS * TOKENS
    live = live & (first_token < query_len)
    first_new = last - query_len
    k_head_ptr = k_ptr + kv_head * stride_kv_head
    v_head_ptr = v_ptr + kv_head * stride_kv_head
    table_ptr = page_table_ptr + seq * stride_table
    early = begin + tl.arange(0, BLOCK_N)
    is_early = (early < end) & live
    early_slots = find_slots(table_ptr, early, is_early, stride_page, page_shift, HEAD_DIM, True)
    early_k = load_rows(k_head_ptr, early_slots, is_early, HEAD_DIM, False, PLAIN, True)
    early_v = load_rows(v_head_ptr, early_slots, is_early, HEAD_DIM, False, PLAIN, True)
    if PREFETCH > 0:
        if live & (begin + BLOCK_N < end):
            prefetch_keys(
                k_head_ptr, v_head_ptr, table_ptr, begin + BLOCK_N, first, end, stride_page, page_shift, HEAD_DIM,
                PREFETCH,
            )  # fmt: skip
    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // GROUP
    row_valid = (token < query_len) & live
    oldest = first_new + token - window + 1  # that a row sees
    head = kv_head * GROUP + rows % GROUP
    tokens = first_token + tl.arange(0, TOKENS)
    query = query_first.to(tl.int64) + tokens
    # Which of the tile of new keys are there, and are this program's.
    new = tl.arange(0, NEW)
    num_new = tl.where(live & (split == splits - 1), query_len, 0)
    is_new = new < num_new
    new_slots = find_slots(table_ptr, first_new + new, is_new, stride_page, page_shift, HEAD_DIM, True)
    frequencies = tl.load(frequencies_ptr + tl.arange(0, HALF))[None, :]
    cos, sin = _rotation(first_new + tokens, frequencies, rope_scale)
    new_cos, new_sin = _rotation(first_new + new, frequencies, rope_scale)
    scale *= LOG2E
    state = start_softmax(sinks_ptr, head, row_valid & (split == 0), BLOCK_M, HEAD_DIM, False)
    if PDL:  # also who has nothing to do: whoever waits for this kernel must not overtake the one before
        let_next_begin_and_wait()
    if not live:
        return

    q_heads = (kv_head * GROUP + tl.arange(0, GROUP)) * HEAD_DIM
    q_at = (query * stride_qkv_token)[:, None, None] + q_heads[None, :, None]
    new_query = query_first.to(tl.int64) + new
    k_at = (new_query * stride_qkv_token)[None, :, None] + (kv_heads * GROUP + kv_head) * HEAD_DIM
    k_mask = is_new[None, :, None]
    q_halves = _load_heads(qkv_ptr, q_at, (tokens < query_len)[:, None, None], HALF)
    k_halves = _load_heads(qkv_ptr, k_at, k_mask, HALF)
    v_halves = _load_heads(qkv_ptr, k_at + kv_heads * HEAD_DIM, k_mask, HALF)
    q_turned = _turned(q_halves, cos[:, None, :], sin[:, None, :], PLAIN)
    k_turned = _turned(k_halves, new_cos[None, :, :], new_sin[None, :, :], PLAIN)
    v_plain = _flat(to_bf16(v_halves[0], PLAIN)), _flat(to_bf16(v_halves[1], PLAIN))
    q = (whole(q_turned[0], q_turned[1]),)
    is_own = is_new & (new >= first_token) & (new < first_token + TOKENS)
    new_k = _keep(k_head_ptr + new_slots[:, None], k_turned, is_own[:, None], HALF)
    new_v = _keep(v_head_ptr + new_slots[:, None], v_plain, is_own[:, None], HALF)
    visible = is_new[None, :] & (new[None, :] <= token[:, None]) & (new[None, :] > token[:, None] - window)
    state = _add_block(state, q, new_k, new_v, visible, scale, PLAIN)
    visible = is_early[None, :] & (early[None, :] >= oldest[:, None])
    state = _add_block(state, q, early_k, early_v, visible, scale, PLAIN)
    for start in tl.range(begin + BLOCK_N, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        valid = n < end
        slots = find_slots(table_ptr, n, valid, stride_page, page_shift, HEAD_DIM, True)
        k = load_rows(k_head_ptr, slots, valid, HEAD_DIM, False, PLAIN, True)
        v = load_rows(v_head_ptr, slots, valid, HEAD_DIM, False, PLAIN, True)
        state = _add_block(state, q, k, v, valid[None, :] & (n[None, :] >= oldest[:, None]), scale, PLAIN)
    finish(
        state, row_valid, query_first.to(tl.int64) + token, head,
        out_ptr, partial_ptr, summary_ptr, spans_ptr, counters_ptr, v_scale_ptr, seq,
        split, first_program, splits, query_first + first_token, tl.minimum(query_len - first_token, TOKENS), GROUP,
        stride_out_token, stride_scale, HEAD_DIM, BLOCK_M, False, SPLIT, INSIDE, PLAIN, PARTS,
    )  # fmt: skip
