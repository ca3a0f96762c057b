"""The jit code of ``triton`` for sequences with few new tokens: gates with their projection, convolution, norms, state
and output norm in one.

A program has one value head of one sequence, and keeps its whole state in registers while it runs the tokens one after
the other. So the norm of the output, which needs the head's every column, costs no launch. And all that is older than
the step (state, columns, weights) comes to registers *before* the program waits for the kernel before it
(``pdl_jit``): of the state's way only the write is left, 64 KB a program for 128 x 128, about a microsecond where one
sequence runs on 32 SMs. Four programs for a head would write in a quarter of that, but its norm would need another
launch or a round of atomics, each of which takes as long as they save.

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
def square(x, PLAIN: tl.constexpr):
    """x * x, rounded, for a sum over lanes. Where the product is fused with the sum's first addition, each of two lanes
    that add the same two squares rounds the other's, and they store two numbers to one place (Triton 3.9)."""
    if PLAIN:
        return x * x
    else:
        return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


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
    """Float32 to the pointers' type."""
    if ptr.dtype.element_ty == tl.bfloat16:
        tl.store(ptr, to_bf16(y, PLAIN), mask=mask)
    else:
        tl.store(ptr, y, mask=mask)


@triton.jit
def _load_taps(conv_ptr, channel, convolved, TAPS: tl.constexpr):
    """The convolution's weights: for the token itself, the one before it, and so on. What is not ``convolved`` stays as
    it is."""
    taps = ()
    for back in tl.static_range(TAPS):
        unchanged = 1.0 if back == 0 else 0.0
        tap = tl.load(conv_ptr + channel * TAPS + (TAPS - 1 - back), mask=convolved, other=unchanged)
        taps = taps + (tap.to(tl.float32),)
    return taps


@triton.jit
def _load_columns(ptr, channel, first, mask, TAPS: tl.constexpr, RING: tl.constexpr):
    """The columns before position ``first``, newest first; zeros for those before the sequence."""
    columns = ()
    for back in tl.static_range(1, TAPS):
        at = ptr + ((first - back) & (RING - 1))
        columns = columns + (tl.load(at + channel * RING, mask=mask & (back <= first), other=0.0),)
    return columns


@triton.jit
def _store_columns(ptr, channel, columns, mask, position, oldest, TAPS: tl.constexpr, RING: tl.constexpr):
    """What the tokens after ``position`` need of the columns up to there, from position ``oldest`` on."""
    for back in tl.static_range(TAPS - 1):
        at = ptr + ((position - back) & (RING - 1))
        tl.store(at + channel * RING, columns[back], mask=mask & (position - back >= oldest))


@triton.jit
def _convolve(columns, taps, TAPS: tl.constexpr):
    """``columns`` from the token's own on, newest first → float32."""
    total = columns[0].to(tl.float32) * taps[0]
    for back in tl.static_range(1, TAPS):
        total += columns[back].to(tl.float32) * taps[back]
    return silu(total)


@triton.jit(
    do_not_specialize=["short_len", "stride_write"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_lens_ptr", "read_ptr", "write_ptr"],
)
def run_tokens(
    projected_ptr, x_ptr, gates_ptr, conv_ptr, decay_ptr, dt_bias_ptr, norm_ptr, state_ptr, columns_ptr, out_ptr,
    query_start_ptr, context_lens_ptr, read_ptr, write_ptr,
    epsilon, short_len, stride_projected, stride_x, stride_state, stride_columns, stride_write,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    HIDDEN: tl.constexpr, ONE: tl.constexpr, VERIFY: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (value heads, sequences). Sequences of none or more than ``short_len`` new tokens are left alone.

    ONE: no sequence has more than one, and there is no loop. VERIFY: the state after each token has a slot, not only
    that after the last.
    """
    head = tl.program_id(0)
    seq = tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    CHANNELS: tl.constexpr = (2 * KEY_HEADS + HEADS) * DIM
    begin = tl.load(query_start_ptr + seq)
    count = tl.load(query_start_ptr + seq + 1) - begin
    # None returns before it waits, on which whoever waits for this kernel relies (``pdl_jit``).
    live = (count > 0) & (count <= short_len)
    first = tl.load(context_lens_ptr + seq) - count
    slot = tl.load(read_ptr + seq, mask=live, other=0).to(tl.int64)

    # q, k, v and z of the head, one after the other: z takes the same way as the others, with taps that leave it alone.
    # They are in one vector because one of fewer channels than threads has no layout of its own in Triton: it gets that
    # of the state's rows, where a thread has 16 channels with all their columns and taps (SM 9.0, Triton 3.7.1: 255
    # registers and 2440 bytes spilled).
    place = tl.arange(0, 4 * DIM)
    part = place // DIM
    own = place % DIM
    key_head = head // GROUP
    channel = tl.where(part < 2, (part * KEY_HEADS + key_head) * DIM, (2 * KEY_HEADS + head) * DIM) + own
    source = tl.where(part < 3, channel, CHANNELS + head * DIM + own)
    # Of a key head, the first value head writes q and k.
    written = (part == 2) | ((part < 2) & (head % GROUP == 0))
    row = tl.arange(0, DIM)[:, None]
    column = tl.arange(0, DIM)
    state_at = head * (DIM * DIM) + row * DIM + column[None, :]
    # At a sequence's beginning nothing of the slot is read: 0 times NaN would be NaN.
    state = tl.load(state_ptr + slot * stride_state + state_at, mask=live & (first > 0), other=0.0)
    before = _load_columns(columns_ptr + slot * stride_columns, channel, first, live & (part < 3), TAPS, RING)
    taps = _load_taps(conv_ptr, channel, part < 3, TAPS)
    decay = tl.load(decay_ptr + head)
    dt_bias = tl.load(dt_bias_ptr + head)
    hidden = tl.arange(0, triton.next_power_of_2(HIDDEN))
    real = hidden < HIDDEN
    b_weights = tl.load(gates_ptr + head * HIDDEN + hidden, mask=real, other=0.0)
    a_weights = tl.load(gates_ptr + (HEADS + head) * HIDDEN + hidden, mask=real, other=0.0)
    if PDL:
        let_next_begin_and_wait()

    if not live:
        return

    for token in range(1 if ONE else count):
        at = (begin + token).to(tl.int64)
        columns = (tl.load(projected_ptr + at * stride_projected + source),) + before
        token_x = tl.load(x_ptr + at * stride_x + hidden, mask=real, other=0.0).to(tl.float32)
        beta = rate(tl.sum(token_x * b_weights.to(tl.float32)))
        kept = tl.exp(log_decay(tl.sum(token_x * a_weights.to(tl.float32)), dt_bias, decay))
        x = tl.reshape(_convolve(columns, taps, TAPS), (4, DIM))
        normed = x * tl.rsqrt(tl.sum(square(x, PLAIN), axis=1) + 1e-6)[:, None]
        x = tl.where(tl.arange(0, 4)[:, None] < 2, normed, x)
        q_and_v, k_and_z = tl.split(tl.permute(tl.reshape(x, (2, 2, DIM)), (2, 0, 1)))
        q, v = tl.split(q_and_v)
        k, gate = tl.split(k_and_z)
        q *= DIM**-0.5

        error = beta * (v - kept * tl.sum(k[:, None] * state, axis=0))
        state = kept * state + k[:, None] * error[None, :]
        answer = tl.sum(q[:, None] * state, axis=0)
        # Loaded here and not above: it would take the registers that keep ONE from spilling (SM 10.0 and 12.x).
        norm = tl.load(norm_ptr + column).to(tl.float32)
        y = answer * tl.rsqrt(tl.sum(square(answer, PLAIN)) / DIM + epsilon) * norm * gate
        store_rounded(out_ptr + (at * HEADS + head) * DIM + column, y, None, PLAIN)

        if VERIFY or ONE or token == count - 1:
            to = tl.load(write_ptr + seq.to(tl.int64) * stride_write + (token if VERIFY else 0)).to(tl.int64)
            tl.store(state_ptr + to * stride_state + state_at, state)
            oldest = tl.where(to == slot, first, 0)
            to_columns = columns_ptr + to * stride_columns
            _store_columns(to_columns, channel, columns, written, first + token, oldest, TAPS, RING)
        before = columns[:-1]
