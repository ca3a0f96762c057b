"""The jit code of ``triton`` for sequences with many new tokens: CHUNK of them at a time, as products of matrices.

Within a chunk, with γ the sum of log decays up to a token, D_ij = exp(γ_i - γ_j) for i ≥ j and 0 above, and S the
state before it:

    A = strictly lower part of β k kᵀ ∘ D           T = (I + A)⁻¹
    V = T β (v - e^γ ∘ k S)                          what the tokens add, once each is relieved of what those before add
    o = e^γ ∘ q S + (q kᵀ ∘ D) V                     S ← e^γ_last S + kᵀ (e^(γ_last - γ) ∘ V)

``prepare`` makes all that needs no state, for all chunks at once. ``advance`` carries the state from chunk to chunk,
some of its columns a program, which depend on no others. ``finish`` norms and gates, for which it needs a head's every
column. All three leave sequences of up to ``short_len`` new tokens alone.

Operands of products are float16, whose 11 bits are those of TF32 at the rate and size of bf16. Against exact
arithmetic (512 tokens, a head of 128) outputs are off by 5e-4 of their RMS and the state by 4e-4; with bf16 operands by
4.4e-3 and 3.4e-3, where rounding an output to bf16 is 1.6e-3. With keys that are all nearly the same, the worst input
that we tried, 2.6e-3 and 1.7e-3 against 2e-2 and 1e-2. Sums, gates, norms and the state from chunk to chunk are in
float32. q, k, T and q kᵀ are at most about 1. Values and the state have no bound, so they are held ``SMALLER`` than
they are: then float16 reaches to a million, and what it loses at the low end is far below the epsilon of the norm.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.recurrent.gated_delta_jit import log_decay, rate, silu, store_rounded

SMALLER = tl.constexpr(2.0**-4)
SUBCHUNK = tl.constexpr(16)


@triton.jit
def _find_chunk(query_start_ptr, num_sequences, block, CHUNK: tl.constexpr):
    """Sequence and first token, counted within it, of block ``block``. There are tokens // CHUNK + sequences blocks,
    and some begin behind their sequence's end."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // CHUNK + middle <= block:
            low = middle
        else:
            high = middle
    return low, (block - tl.load(query_start_ptr + low) // CHUNK - low) * CHUNK


@triton.jit
def _tap(conv_ptr, channel, back, TAPS: tl.constexpr):
    """Each channel's weight for the token ``back`` before."""
    return tl.load(conv_ptr + channel * TAPS + (TAPS - 1 - back)).to(tl.float32)


@triton.jit
def _convolved(
    new_ptr, columns_ptr, conv_ptr, channel, token, count, first, stride, TAPS: tl.constexpr, RING: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Tokens ``token`` to ``token + CHUNK`` of a sequence, whose new ones are at ``new_ptr``, after convolution and
    SiLU ``[CHUNK, channels]``; zeros behind its end."""
    at = token + tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK, channel.shape[0]], tl.float32)
    for back in tl.static_range(TAPS):
        source = new_ptr + (at - back).to(tl.int64)[:, None] * stride + channel[None, :]
        x = tl.load(source, mask=((at >= back) & (at < count))[:, None], other=0.0).to(tl.float32)
        total += x * _tap(conv_ptr, channel, back, TAPS)[None, :]
    if token == 0:
        # What the first tokens see of the slot. Columns from before the sequence are not read: they may be NaN.
        for row in tl.static_range(TAPS - 1):
            seen = tl.zeros([channel.shape[0]], tl.float32)
            for back in tl.static_range(row + 1, TAPS):
                column = channel * RING + ((first + row - back) & (RING - 1))
                old = tl.load(columns_ptr + column, mask=first + row >= back, other=0.0).to(tl.float32)
                seen += old * _tap(conv_ptr, channel, back, TAPS)
            total += tl.where((at == row)[:, None], seen[None, :], 0.0)
    return silu(total)


@triton.jit
def _inverse(a, CHUNK: tl.constexpr):
    """(I + a)⁻¹ of a strictly lower triangular ``a [CHUNK, CHUNK]``.

    Blocks on the diagonal row by row, in float32. With X their inverse and N the rest of ``a``, I + a is
    X⁻¹ (I + M) where M = X N, whose fourth power is 0 for four blocks: (I + M)⁻¹ = I - M + M² - M³. The same series for
    all of ``a`` has terms of 1e17 where keys are equal.
    """
    BLOCKS: tl.constexpr = CHUNK // SUBCHUNK
    tl.static_assert(BLOCKS == 4)
    block = tl.arange(0, BLOCKS)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    own = tl.sum(tl.where(on_diagonal, tl.reshape(a, (BLOCKS, SUBCHUNK, BLOCKS, SUBCHUNK)), 0.0), axis=2)
    at = tl.arange(0, SUBCHUNK)
    x = tl.where(at[None, :, None] == at[None, None, :], 1.0, tl.zeros_like(own))
    for row in range(1, SUBCHUNK):
        is_row = at[None, :, None] == row
        factors = tl.sum(tl.where(is_row, own, 0.0), axis=1)
        # The mask changes no sum: it keeps a product from being fused with the first addition. Lanes that add the same
        # two products would each round the other's, and store two numbers to one place (Triton 3.9).
        terms = tl.where(at[None, :, None] < row, factors[:, :, None] * x, 0.0)
        x -= tl.where(is_row, tl.sum(terms, axis=1)[:, None, :], 0.0)
    x = tl.reshape(tl.where(on_diagonal, x[:, :, None, :], 0.0), (CHUNK, CHUNK))
    i = tl.arange(0, CHUNK)
    rest = tl.where(i[:, None] // SUBCHUNK > i[None, :] // SUBCHUNK, a, 0.0)
    m = tl.dot(x.to(tl.float16), rest.to(tl.float16))
    square = tl.dot(m.to(tl.float16), m.to(tl.float16))
    series = square - m - tl.dot(m.to(tl.float16), square.to(tl.float16))
    return x + tl.dot(series.to(tl.float16), x.to(tl.float16))


@triton.jit(
    do_not_specialize=["tokens", "num_sequences", "short_len"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_lens_ptr", "read_ptr"],
)
def prepare(
    projected_ptr, gates_ptr, conv_ptr, decay_ptr, dt_bias_ptr, columns_ptr,
    q_ptr, k_ptr, v_ptr, inverse_ptr, scores_ptr, decays_ptr, rates_ptr,
    query_start_ptr, context_lens_ptr, read_ptr,
    tokens, num_sequences, short_len, stride_projected, stride_gates, stride_columns,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, value heads). Writes q, k ``[key heads, tokens, DIM]`` and v ``[value heads, tokens, DIM]``, T and
    q kᵀ ∘ D ``[value heads, tokens, CHUNK]``, and γ and β ``[value heads, tokens]``."""
    head = tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    seq, token = _find_chunk(query_start_ptr, num_sequences, tl.program_id(0), CHUNK)
    begin = tl.load(query_start_ptr + seq)
    count = tl.load(query_start_ptr + seq + 1) - begin
    if (count <= short_len) | (token >= count):
        return
    first = tl.load(context_lens_ptr + seq) - count
    slot_columns = columns_ptr + tl.load(read_ptr + seq).to(tl.int64) * stride_columns
    new_ptr = projected_ptr + begin.to(tl.int64) * stride_projected
    key_head = head // GROUP
    column = tl.arange(0, DIM)
    i = tl.arange(0, CHUNK)
    real = token + i < count
    row = begin + token + i
    of_key_head = (key_head.to(tl.int64) * tokens + row)[:, None] * DIM + column[None, :]
    of_head = head.to(tl.int64) * tokens + row
    written = real[:, None] & (head % GROUP == 0)

    v_channel = (2 * KEY_HEADS + head) * DIM + column
    v = _convolved(new_ptr, slot_columns, conv_ptr, v_channel, token, count, first, stride_projected, TAPS, RING, CHUNK)
    tl.store(v_ptr + of_head[:, None] * DIM + column[None, :], (v * SMALLER).to(tl.float16), mask=real[:, None])
    q_channel = key_head * DIM + column
    q = _convolved(new_ptr, slot_columns, conv_ptr, q_channel, token, count, first, stride_projected, TAPS, RING, CHUNK)
    q = (q * tl.rsqrt((tl.sum(q * q, axis=1) + 1e-6) * DIM)[:, None]).to(tl.float16)
    tl.store(q_ptr + of_key_head, q, mask=written)
    k_channel = KEY_HEADS * DIM + q_channel
    k = _convolved(new_ptr, slot_columns, conv_ptr, k_channel, token, count, first, stride_projected, TAPS, RING, CHUNK)
    k = (k * tl.rsqrt(tl.sum(k * k, axis=1) + 1e-6)[:, None]).to(tl.float16)
    tl.store(k_ptr + of_key_head, k, mask=written)

    gates_row = gates_ptr + row.to(tl.int64) * stride_gates + head
    beta = tl.where(real, rate(tl.load(gates_row, mask=real, other=0.0)), 0.0)
    a = tl.load(gates_row + HEADS, mask=real, other=0.0)
    gamma = tl.cumsum(tl.where(real, log_decay(a, tl.load(dt_bias_ptr + head), tl.load(decay_ptr + head)), 0.0), axis=0)
    tl.store(decays_ptr + of_head, gamma, mask=real)
    tl.store(rates_ptr + of_head, beta, mask=real)

    seen = i[:, None] >= i[None, :]
    decayed = tl.where(seen, tl.exp(tl.where(seen, gamma[:, None] - gamma[None, :], 0.0)), 0.0)
    chunk_at = of_head[:, None] * CHUNK + i[None, :]
    tl.store(scores_ptr + chunk_at, (tl.dot(q, tl.trans(k)) * decayed).to(tl.float16), mask=real[:, None])
    a = tl.where(i[:, None] > i[None, :], tl.dot(k, tl.trans(k)) * decayed * beta[:, None], 0.0)
    tl.store(inverse_ptr + chunk_at, _inverse(a, CHUNK).to(tl.float16), mask=real[:, None])


@triton.jit
def _move_columns(from_ptr, to_ptr, channel, last, stride, TAPS: tl.constexpr, RING: tl.constexpr):
    """The last new tokens' columns. ``from_ptr``: the last one's projections; ``last``: its position."""
    for back in tl.static_range(TAPS - 1):
        x = tl.load(from_ptr - back * stride + channel)
        tl.store(to_ptr + channel * RING + ((last - back) & (RING - 1)), x)


@triton.jit(
    do_not_specialize=["tokens", "short_len", "stride_write"],
    do_not_specialize_on_alignment=["query_start_ptr", "context_lens_ptr", "read_ptr", "write_ptr"],
)
def advance(
    projected_ptr, q_ptr, k_ptr, v_ptr, inverse_ptr, scores_ptr, decays_ptr, rates_ptr, state_ptr, columns_ptr,
    query_start_ptr, context_lens_ptr, read_ptr, write_ptr,
    tokens, short_len, stride_projected, stride_state, stride_columns, stride_write,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: (value heads times blocks of the state's columns, sequences). The outputs take the place of the values.

    Everything is transposed, with the state's columns as rows: so each sum is an operand of the next product from the
    left, which it may be without leaving the registers, and the rows of a warp meet no other warp's.
    """
    BLOCKS: tl.constexpr = DIM // BLOCK_V
    head = tl.program_id(0) // BLOCKS
    part = tl.program_id(0) % BLOCKS
    seq = tl.program_id(1)
    begin = tl.load(query_start_ptr + seq)
    count = tl.load(query_start_ptr + seq + 1) - begin
    if count <= short_len:
        return
    context = tl.load(context_lens_ptr + seq)
    slot = tl.load(read_ptr + seq).to(tl.int64)
    to = tl.load(write_ptr + seq.to(tl.int64) * stride_write).to(tl.int64)
    key_head = head // GROUP
    key = tl.arange(0, DIM)
    value = part * BLOCK_V + tl.arange(0, BLOCK_V)
    i = tl.arange(0, CHUNK)
    state_at = head * (DIM * DIM) + key[:, None] * DIM + value[None, :]
    state = tl.load(state_ptr + slot * stride_state + state_at, mask=context > count, other=0.0)
    state = tl.trans(state) * SMALLER  # [BLOCK_V, DIM]

    for token in range(0, count, CHUNK):
        real = token + i < count
        row = begin + token + i
        of_head = head.to(tl.int64) * tokens + row
        of_key_head = (key_head.to(tl.int64) * tokens + row)[:, None] * DIM + key[None, :]
        chunk_at = of_head[:, None] * CHUNK + i[None, :]
        v_at = of_head[:, None] * DIM + value[None, :]
        k = tl.load(k_ptr + of_key_head, mask=real[:, None], other=0.0)
        q = tl.load(q_ptr + of_key_head, mask=real[:, None], other=0.0)
        inverse = tl.load(inverse_ptr + chunk_at, mask=real[:, None], other=0.0)
        scores = tl.load(scores_ptr + chunk_at, mask=real[:, None], other=0.0)
        v = tl.trans(tl.load(v_ptr + v_at, mask=real[:, None], other=0.0)).to(tl.float32)
        gamma = tl.load(decays_ptr + of_head, mask=real, other=0.0)
        beta = tl.load(rates_ptr + of_head, mask=real, other=0.0)
        last = tl.load(decays_ptr + head.to(tl.int64) * tokens + begin + tl.minimum(token + CHUNK, count) - 1)

        narrow = state.to(tl.float16)
        kept = tl.exp(gamma)[None, :]
        error = beta[None, :] * (v - kept * tl.dot(narrow, tl.trans(k)))
        added = tl.dot(error.to(tl.float16), tl.trans(inverse))
        answer = kept * tl.dot(narrow, tl.trans(q))
        answer = tl.dot(added.to(tl.float16), tl.trans(scores), answer)
        state = tl.dot((added * tl.exp(last - gamma)[None, :]).to(tl.float16), k, state * tl.exp(last))
        tl.store(v_ptr + v_at, tl.trans(answer * (1 / SMALLER)).to(tl.float16), mask=real[:, None])

    tl.store(state_ptr + to * stride_state + state_at, tl.trans(state) * (1 / SMALLER))
    # ``prepare`` was the last to read columns.
    last_row = projected_ptr + (begin + count - 1).to(tl.int64) * stride_projected
    to_columns = columns_ptr + to * stride_columns
    v_channel = (2 * KEY_HEADS + head) * DIM + value
    _move_columns(last_row, to_columns, v_channel, context - 1, stride_projected, TAPS, RING)
    if (part == 0) & (head % GROUP == 0):
        q_channel = key_head * DIM + key
        _move_columns(last_row, to_columns, q_channel, context - 1, stride_projected, TAPS, RING)
        k_channel = KEY_HEADS * DIM + q_channel
        _move_columns(last_row, to_columns, k_channel, context - 1, stride_projected, TAPS, RING)


@triton.jit(
    do_not_specialize=["tokens", "num_sequences", "short_len"], do_not_specialize_on_alignment=["query_start_ptr"]
)
def finish(
    projected_ptr, answer_ptr, norm_ptr, out_ptr, query_start_ptr, epsilon, tokens, num_sequences, short_len,
    stride_projected,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, value heads)."""
    head = tl.program_id(1)
    HEADS: tl.constexpr = KEY_HEADS * GROUP
    seq, token = _find_chunk(query_start_ptr, num_sequences, tl.program_id(0), CHUNK)
    begin = tl.load(query_start_ptr + seq)
    count = tl.load(query_start_ptr + seq + 1) - begin
    if (count <= short_len) | (token >= count):
        return
    column = tl.arange(0, DIM)
    i = tl.arange(0, CHUNK)
    real = (token + i < count)[:, None]
    row = (begin + token + i).to(tl.int64)[:, None]
    z_at = row * stride_projected + (2 * KEY_HEADS + HEADS + head) * DIM + column[None, :]
    z = tl.load(projected_ptr + z_at, mask=real, other=0.0).to(tl.float32)
    answer_at = (head.to(tl.int64) * tokens + row) * DIM + column[None, :]
    answer = tl.load(answer_ptr + answer_at, mask=real, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(answer * answer, axis=1) / DIM + epsilon)
    y = answer * scale[:, None] * tl.load(norm_ptr + column).to(tl.float32)[None, :] * silu(z)
    store_rounded(out_ptr + (row * HEADS + head) * DIM + column[None, :], y, real, PLAIN)
