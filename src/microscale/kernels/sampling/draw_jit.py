"""Jit code of ``triton_sampling``: what every batch needs, from logits to tokens and log-probabilities.

A row is read in blocks of ``BLOCK`` tokens, a program each, whatever the batch. ``scan`` gives each block's maximum,
its place and its sum of exponentials, the same three that the logits epilogue gives; ``weigh`` each block's weight;
``pick``, one program a row, draws a block, then a token of it.

Weights are integers: ``2**36 * exp((x - max) / T)`` without its fraction. Sums of integers do not depend on the order,
so neither do thresholds, totals and tokens, and atomics are safe. What is lost: a token below ``2**-36`` of the largest
is never drawn, which takes at most 4e-6 of the probability from all of them together.

Compiled without fused multiply-adds, so that the same number comes out the same in every kernel.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl

WEIGHT_ONE: tl.constexpr = tl.constexpr(2.0**36)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
OUTPUT_BITS: tl.constexpr = tl.constexpr((1 << 30) - 1)
LAST: tl.constexpr = tl.constexpr(0x7FFFFFFF)
NEVER: tl.constexpr = tl.constexpr(-(2**63))
OK: tl.constexpr = tl.constexpr(0)
NON_FINITE: tl.constexpr = tl.constexpr(1)
NOTHING_ALLOWED: tl.constexpr = tl.constexpr(2)


@triton.jit
def rank(x, token):
    """An integer for each token of a row: in the order of the logits and, among equals, of falling ids."""
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 ties with 0.0
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def load_block(values_ptr, row, block, vocab, stride, BLOCK: tl.constexpr):
    """The tokens of a block and their logits: -inf past the vocabulary."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values_ptr + row.to(tl.int64) * stride + token, mask=token < vocab, other=float("-inf"))
    return token, x


@triton.jit
def row_max(max_ptr, row, blocks, MERGE: tl.constexpr):
    """The largest logit of a row from its blocks' maxima; NaN if one of them is."""
    at = tl.arange(0, MERGE)
    top = tl.full([MERGE], float("-inf"), tl.float32)
    broken = tl.zeros([MERGE], tl.int32)
    for start in range(0, blocks, MERGE):
        m = tl.load(max_ptr + row.to(tl.int64) * blocks + start + at, mask=start + at < blocks, other=float("-inf"))
        broken = tl.where(m != m, 1, broken)
        top = tl.where(m > top, m, top)
    return tl.where(tl.max(broken, axis=0) != 0, float("nan"), tl.max(top, axis=0))


@triton.jit
def is_finite(x):
    return (x > float("-inf")) & (x < float("inf"))


@triton.jit
def steepness(temperature):
    """log2(e) / T: finite, so that 0 times it is 0 for the least of temperatures too."""
    return LOG2_E / tl.maximum(temperature, 1e-30)


@triton.jit
def share_of(x, top, steep):
    """The weight of a token over that of the likeliest."""
    return tl.exp2((x - top) * steep)


@triton.jit
def weight_of(share):
    return (share * WEIGHT_ONE).to(tl.int64)


@triton.jit
def _penalised(
    x, row, token, inside, slots_ptr, counts_ptr, allowed_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    vocab, words, HISTORY: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Penalties and mask for tokens of one row."""
    if HISTORY:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        entry = tl.load(counts_ptr + slot * vocab + token, mask=inside, other=0)
        output = entry & OUTPUT_BITS
        factor = tl.where(entry != 0, tl.load(repetition_ptr + row), 1.0)
        x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
        x = x - tl.load(frequency_ptr + row) * output.to(tl.float32)
        x = x - tl.where(output > 0, tl.load(presence_ptr + row), 0.0)
    if ALLOWED:
        word = tl.load(allowed_ptr + row.to(tl.int64) * words + token // 32, mask=inside, other=0)
        x = tl.where((word >> (token % 32)) & 1 != 0, x, float("-inf"))
    return x


@triton.jit(do_not_specialize_on_alignment=["repetition_ptr", "presence_ptr", "frequency_ptr"])
def scan(
    logits_ptr,  # [rows, vocab] float32
    values_ptr,  # [rows, vocab] float32: the logits with penalties and mask, where COPY
    slots_ptr, counts_ptr, allowed_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    max_ptr, argmax_ptr, sum_ptr,  # [rows, blocks]
    vocab, stride, words,
    BLOCK: tl.constexpr, COPY: tl.constexpr, HISTORY: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks). What the logits epilogue would give for this block."""
    row, block = tl.program_id(0), tl.program_id(1)
    token, x = load_block(logits_ptr, row, block, vocab, stride, BLOCK)
    inside = token < vocab
    top = tl.max(x, axis=0)
    broken = tl.max((x != x).to(tl.int32), axis=0)
    at = row.to(tl.int64) * tl.num_programs(1) + block
    tl.store(max_ptr + at, tl.where(broken != 0, float("nan"), top))
    tl.store(argmax_ptr + at, tl.min(tl.where(x == top, token, LAST), axis=0))
    tl.store(sum_ptr + at, tl.sum(tl.where(x > float("-inf"), tl.exp(x - top), 0.0), axis=0))
    if COPY:
        y = _penalised(
            x, row, token, inside, slots_ptr, counts_ptr, allowed_ptr, repetition_ptr, presence_ptr, frequency_ptr,
            vocab, words, HISTORY, ALLOWED,
        )  # fmt: skip
        tl.store(values_ptr + row.to(tl.int64) * vocab + token, y, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["repetition_ptr", "presence_ptr", "frequency_ptr"])
def add_bias(
    logits_ptr, values_ptr, bias_tokens_ptr, bias_values_ptr,
    slots_ptr, counts_ptr, allowed_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    vocab, stride, words, capacity,
    PAIRS: tl.constexpr, HISTORY: tl.constexpr, ALLOWED: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). Bias comes before penalties: the few tokens that have one are computed again."""
    row = tl.program_id(0)
    for start in range(0, capacity, PAIRS):
        at = start + tl.arange(0, PAIRS)
        token = tl.load(bias_tokens_ptr + row * capacity + at, mask=at < capacity, other=-1)
        real = (token >= 0) & (token < vocab)
        x = tl.load(logits_ptr + row.to(tl.int64) * stride + token, mask=real, other=0.0)
        x = x + tl.load(bias_values_ptr + row * capacity + at, mask=real, other=0.0)
        y = _penalised(
            x, row, token, real, slots_ptr, counts_ptr, allowed_ptr, repetition_ptr, presence_ptr, frequency_ptr,
            vocab, words, HISTORY, ALLOWED,
        )  # fmt: skip
        tl.store(values_ptr + row.to(tl.int64) * vocab + token, y, mask=real)


@triton.jit
def _kept_weights(x, token, row, top, steep, min_p_ptr, cutoff_ptr, FILTER: tl.constexpr):
    share = share_of(x, top, steep)
    kept = share >= tl.load(min_p_ptr + row)
    if FILTER:
        kept = kept & (rank(x, token) >= tl.load(cutoff_ptr + row))
    return tl.where(kept, weight_of(share), 0)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "min_p_ptr"])
def weigh(
    values_ptr, max_ptr, temperature_ptr, min_p_ptr, cutoff_ptr,
    weights_ptr,  # [rows, blocks] int64
    vocab, stride,
    BLOCK: tl.constexpr, MERGE: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    """Grid: (rows, blocks). The weight of all tokens of a block that may be drawn."""
    row, block = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top = row_max(max_ptr, row, tl.num_programs(1), MERGE)
    if (temperature > 0) & is_finite(top):
        token, x = load_block(values_ptr, row, block, vocab, stride, BLOCK)
        weights = _kept_weights(x, token, row, top, steepness(temperature), min_p_ptr, cutoff_ptr, FILTER)
        tl.store(weights_ptr + row.to(tl.int64) * tl.num_programs(1) + block, tl.sum(weights, axis=0))


@triton.jit
def _draw(
    row, top, temperature, values_ptr, min_p_ptr, cutoff_ptr, weights_ptr, seed_ptr, position_ptr,
    vocab, stride, blocks,
    BLOCK: tl.constexpr, MERGE: tl.constexpr, FILTER: tl.constexpr,
):  # fmt: skip
    """The token whose part of the row's weight, in id order, holds a number drawn from all of it."""
    position = tl.load(position_ptr + row)
    zero = tl.zeros([1], tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    words = tl.philox(tl.load(seed_ptr + row), zero + low, zero + high, zero, zero)
    bits = (words[0].to(tl.uint64) << 32) | words[1].to(tl.uint64)

    at = tl.arange(0, MERGE)
    mine = tl.load(weights_ptr + row.to(tl.int64) * blocks + at, mask=at < blocks, other=0)
    ends = tl.cumsum(mine, axis=0)
    total = tl.sum(mine, axis=0)
    # floor(u * total) with all 64 bits of u: a whole number below total, each as likely as any other within 2**-10.
    number = tl.max(tl.umulhi(bits, zero.to(tl.uint64) + total.to(tl.uint64)).to(tl.int64), axis=0)
    block = tl.sum((ends <= number).to(tl.int32), axis=0)
    rest = number - tl.max(tl.where(ends <= number, ends, 0), axis=0)

    token, x = load_block(values_ptr, row, block, vocab, stride, BLOCK)
    weights = _kept_weights(x, token, row, top, steepness(temperature), min_p_ptr, cutoff_ptr, FILTER)
    place = tl.sum((tl.cumsum(weights, axis=0) <= rest).to(tl.int32), axis=0)
    return block * BLOCK + tl.minimum(place, BLOCK - 1)


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "min_p_ptr", "seed_ptr", "position_ptr"])
def pick(
    logits_ptr, raw_max_ptr, raw_sum_ptr,  # the model's own logits, for log-probabilities
    values_ptr, max_ptr, argmax_ptr,  # what is sampled
    temperature_ptr, min_p_ptr, cutoff_ptr, weights_ptr, seed_ptr, position_ptr, slots_ptr, counts_ptr,
    tokens_ptr, logprobs_ptr, status_ptr,
    vocab, stride_logits, stride, blocks,
    BLOCK: tl.constexpr, MERGE: tl.constexpr, DRAW: tl.constexpr, FILTER: tl.constexpr, HISTORY: tl.constexpr,
    GIVEN: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). Chooses the token (or takes the GIVEN one), and says how likely it was."""
    row = tl.program_id(0)
    at = tl.arange(0, MERGE)
    raw_top = row_max(raw_max_ptr, row, blocks, MERGE)
    top = row_max(max_ptr, row, blocks, MERGE)
    total = tl.zeros([MERGE], tl.float32)
    best = tl.full([MERGE], LAST, tl.int32)
    for start in range(0, blocks, MERGE):
        place = row.to(tl.int64) * blocks + start + at
        inside = start + at < blocks
        m = tl.load(raw_max_ptr + place, mask=inside, other=float("-inf"))
        part = tl.load(raw_sum_ptr + place, mask=inside, other=0.0)
        total += tl.where(m > float("-inf"), part * tl.exp(m - raw_top), 0.0)
        m = tl.load(max_ptr + place, mask=inside, other=float("-inf"))
        where = tl.load(argmax_ptr + place, mask=inside, other=LAST)
        best = tl.where(m == top, tl.minimum(best, where), best)

    status = tl.where(top == float("-inf"), NOTHING_ALLOWED, OK)
    status = tl.where(is_finite(raw_top) & (top < float("inf")), status, NON_FINITE)
    if GIVEN:
        token = tl.load(tokens_ptr + row)
    else:
        token = tl.where(status == OK, tl.min(best, axis=0), 0)
        if DRAW:
            temperature = tl.load(temperature_ptr + row)
            if (status == OK) & (temperature > 0):
                token = _draw(
                    row, top, temperature, values_ptr, min_p_ptr, cutoff_ptr, weights_ptr, seed_ptr, position_ptr,
                    vocab, stride, blocks, BLOCK, MERGE, FILTER,
                )  # fmt: skip
        tl.store(tokens_ptr + row, token)
        if HISTORY:
            count_ptr = counts_ptr + tl.load(slots_ptr + row).to(tl.int64) * vocab + token
            tl.store(count_ptr, tl.load(count_ptr) + 1, mask=status == OK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride_logits + token)
    tl.store(logprobs_ptr + row, x - raw_top - tl.log(tl.sum(total, axis=0)))
    tl.store(status_ptr + row, status)
