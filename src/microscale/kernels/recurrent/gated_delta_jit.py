"""The jit code of ``triton`` for sequences with few new tokens: convolution, norms, gates, state, output norm in one.

A program has one value head of one sequence, and keeps its whole state in registers while it runs the tokens one after
the other. Two things follow from that. The norm of the output, which needs the head's every column, costs no launch. And
all that is older than the step (state, columns, weights) comes to registers *before* the program waits for the kernel
before it (``pdl_jit``), so that of the state's way only the write is left: 64 KB a program for 128 x 128, about a
microsecond. Columns split among four programs would write in a quarter of that, and need a launch or a round of atomics
for the norm, which takes longer.

The programs of a key head's value heads all read the columns of its q and k, and the first of them writes them. In
place it writes those of new positions alone. With up to ``RING - (taps - 1)`` new tokens these are in other places of
the ring than what the others still read.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def log_decay(a, dt_bias, decay):
    """``decay * softplus(a + dt_bias)``.

    log(1 + e) as a series, because a head that forgets within a million tokens has e of 1e-6, of which ``1 + e`` keeps
    one bit in ten. e is at most 1, and the first term that is left out 2e-8 of the sum.
    """
    x = a.to(tl.float32) + dt_bias
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    r = s * s
    series = 1.0 + r * (1 / 3 + r * (1 / 5 + r * (1 / 7 + r * (1 / 9 + r * (1 / 11 + r * (1 / 13))))))
    return decay * (tl.maximum(x, 0.0) + 2.0 * s * series)


@triton.jit
def rate(b):
    return 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def store_rounded(ptr, y, mask, PLAIN: tl.constexpr):
    """Float32 to the pointer's type."""
    if ptr.dtype.element_ty == tl.bfloat16:
        tl.store(ptr, to_bf16(y, PLAIN), mask=mask)
    else:
        tl.store(ptr, y, mask=mask)


@triton.jit
def _columns(ptr, channel, shown, live, RING: tl.constexpr):
    """The ring of some channels ``[channels, RING]``, zero where not ``shown [RING]``. What is not shown may be NaN."""
    at = channel[:, None] * RING + tl.arange(0, RING)[None, :]
    x = tl.load(ptr + at, mask=live, other=0.0)
    return tl.where(shown[None, :], x, tl.zeros_like(x))


@triton.jit
def _taps(conv_ptr, channel, age, live, TAPS: tl.constexpr):
    """Each column's weight ``[channels, RING]``: that of its ``age [RING]``, zero where the convolution is past it."""
    at = channel[:, None] * TAPS + (TAPS - 1 - age)[None, :]
    return tl.load(conv_ptr + at, mask=live & (age < TAPS)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store_columns(ptr, channel, columns, shown, RING: tl.constexpr):
    at = channel[:, None] * RING + tl.arange(0, RING)[None, :]
    tl.store(ptr + at, columns, mask=shown[None, :])


@triton.jit(
    do_not_specialize=["short_len", "stride_write"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_lens_ptr", "read_ptr", "write_ptr"],
)
def run_tokens(
    projected_ptr, gates_ptr, conv_ptr, decay_ptr, dt_bias_ptr, norm_ptr, state_ptr, columns_ptr, out_ptr,
    query_start_ptr, context_lens_ptr, read_ptr, write_ptr,
    epsilon, short_len, stride_projected, stride_gates, stride_state, stride_columns, stride_write,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TAPS: tl.constexpr,
    RING: tl.constexpr, VERIFY: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (value heads, sequences). Sequences of more than ``short_len`` new tokens are left alone, and those of none.

    VERIFY: the state after each token has a slot, not only that after the last.
    """
    head = tl.program_id(0)
    seq = tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
    begin = tl.load(query_start_ptr + seq)
    count = tl.load(query_start_ptr + seq + 1) - begin
    # No early return: every program waits below, on which whoever waits for this kernel relies (``pdl_jit``).
    live = (count > 0) & (count <= short_len)
    count = tl.where(live, count, 0)
    first = tl.load(context_lens_ptr + seq) - count
    slot = tl.load(read_ptr + seq, mask=live, other=0).to(tl.int64)

    key = tl.arange(0, KEY_DIM)
    value = tl.arange(0, VALUE_DIM)
    ring = tl.arange(0, RING)
    q_channel = head // GROUP * KEY_DIM + key
    k_channel = KEY_HEADS * KEY_DIM + q_channel
    v_channel = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value
    state_at = head * (KEY_DIM * VALUE_DIM) + key[:, None] * VALUE_DIM + value[None, :]
    # At a sequence's beginning nothing of the slot is used: 0 times NaN would be NaN.
    state = tl.load(state_ptr + slot * stride_state + state_at, mask=live & (first > 0), other=0.0)
    age = (first - ring) & (RING - 1)
    before = (age >= 1) & (age < TAPS) & (age <= first)
    slot_columns = columns_ptr + slot * stride_columns
    q_columns = _columns(slot_columns, q_channel, before, live, RING)
    k_columns = _columns(slot_columns, k_channel, before, live, RING)
    v_columns = _columns(slot_columns, v_channel, before, live, RING)
    q_taps = _taps(conv_ptr, q_channel, age, live, TAPS)
    k_taps = _taps(conv_ptr, k_channel, age, live, TAPS)
    v_taps = _taps(conv_ptr, v_channel, age, live, TAPS)
    decay = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    norm = tl.load(norm_ptr + value).to(tl.float32)
    if PDL:
        let_next_begin_and_wait()

    for token in range(count):
        row = projected_ptr + (begin + token).to(tl.int64) * stride_projected
        q_new = tl.load(row + q_channel)
        k_new = tl.load(row + k_channel)
        v_new = tl.load(row + v_channel)
        z = tl.load(row + CHANNELS + head * VALUE_DIM + value).to(tl.float32)
        gates_row = gates_ptr + (begin + token).to(tl.int64) * stride_gates
        beta = rate(tl.load(gates_row + head))
        kept = tl.exp(log_decay(tl.load(gates_row + HEADS + head), dt_bias, decay))

        age = (first + token - ring) & (RING - 1)
        newest = (age == 0)[None, :]
        q_columns = tl.where(newest, q_new[:, None], q_columns)
        k_columns = tl.where(newest, k_new[:, None], k_columns)
        v_columns = tl.where(newest, v_new[:, None], v_columns)
        q = silu(tl.sum(q_columns.to(tl.float32) * q_taps, axis=1))
        k = silu(tl.sum(k_columns.to(tl.float32) * k_taps, axis=1))
        v = silu(tl.sum(v_columns.to(tl.float32) * v_taps, axis=1))
        q *= tl.rsqrt((tl.sum(q * q) + 1e-6) * KEY_DIM)
        k *= tl.rsqrt(tl.sum(k * k) + 1e-6)

        # The answer of the new state is the old one's and q·k times what is added: both sums are of the old state, and
        # neither waits for the other.
        recalled = tl.sum(k[:, None] * state, axis=0)
        answer = tl.sum(q[:, None] * state, axis=0)
        error = beta * (v - kept * recalled)
        answer = kept * answer + tl.sum(q * k) * error
        state = kept * state + k[:, None] * error[None, :]
        y = answer * tl.rsqrt(tl.sum(answer * answer) / VALUE_DIM + epsilon) * norm * silu(z)
        out_row = out_ptr + (begin + token).to(tl.int64) * (HEADS * VALUE_DIM)
        store_rounded(out_row + head * VALUE_DIM + value, y, None, PLAIN)

        if VERIFY or token == count - 1:
            to = tl.load(write_ptr + seq.to(tl.int64) * stride_write + (token if VERIFY else 0)).to(tl.int64)
            tl.store(state_ptr + to * stride_state + state_at, state)
            # Of positions that there are; in place, new ones alone.
            shown = (age < TAPS - 1) & (age <= first + token) & ((age <= token) | (to != slot))
            slot_columns = columns_ptr + to * stride_columns
            _store_columns(slot_columns, v_channel, v_columns, shown, RING)
            if head % GROUP == 0:
                _store_columns(slot_columns, q_channel, q_columns, shown, RING)
                _store_columns(slot_columns, k_channel, k_columns, shown, RING)
        more = token + 1 < count
        age = (first + token + 1 - ring) & (RING - 1)
        q_taps = _taps(conv_ptr, q_channel, age, more, TAPS)
        k_taps = _taps(conv_ptr, k_channel, age, more, TAPS)
        v_taps = _taps(conv_ptr, v_channel, age, more, TAPS)
