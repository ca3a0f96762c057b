"""The jit code of ``triton_small``'s norms: one program normalises one token, in float32, in one pass over its data."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.moe.routing_jit import NEVER, choose
from microscale.kernels.mxfp8_jit import round_e4m3
from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16


@triton.jit
def _rounded(v, PLAIN: tl.constexpr):
    """float32 → float32 that bf16 holds."""
    if PLAIN:
        bits = v.to(tl.uint32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _load(ptr, column, mask):
    return tl.load(ptr + column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _summed(parts_ptr, column, mask, width, TOP_K: tl.constexpr, PLAIN: tl.constexpr):
    """What ``moe.pairs_jit.combine`` makes of a token's TOP_K parts, bit for bit: the sum from 0.0 on, in their order,
    as bf16 holds it. All parts are fetched before the first is added."""
    parts = ()
    for k in tl.static_range(TOP_K):
        parts = parts + (_load(parts_ptr + k * width, column, mask),)
    total = tl.zeros_like(parts[0])
    for k in tl.static_range(TOP_K):
        total += parts[k]
    return _rounded(total, PLAIN)


@triton.jit
def _early(ptr, column, mask, EARLY: tl.constexpr):
    """A weight in bf16, half of the registers; if not EARLY nothing yet."""
    if EARLY:
        return tl.load(ptr + column, mask=mask, other=0.0)
    else:
        return column


@triton.jit
def _weight(early, ptr, column, mask, EARLY: tl.constexpr):
    """What ``_early`` fetched, in float32; if not EARLY it is fetched now."""
    if EARLY:
        return early.to(tl.float32)
    else:
        return _load(ptr, column, mask)


@triton.jit
def _normed(x, width, epsilon):
    """``x / sqrt(mean(x**2) + epsilon)``; columns past ``width`` hold zeros."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)


@triton.jit
def _normed_both(x, other, width, epsilon):
    """``_normed`` of each. Their sums are one reduction: every one is a barrier that all warps meet at."""
    both = tl.join(x, other)
    first, second = tl.split(tl.sum(both * both, axis=0))
    return x * tl.rsqrt(first / width + epsilon), other * tl.rsqrt(second / width + epsilon)


@triton.jit
def _choose_ranked(logits_ptr, scale, ids_ptr, weights_ptr, num_experts, TOP_K: tl.constexpr, E_PAD: tl.constexpr):
    """``routing_jit.choose`` for one token, whose experts' factors ``scale [E_PAD]`` are here already.

    An expert's place is the number of experts above it. Counted for all at once that is one reduction, where TOP_K
    maxima one after the other are TOP_K.
    """
    expert = tl.arange(0, E_PAD)
    real = expert < num_experts
    x = tl.load(logits_ptr + expert, mask=real, other=0.0)
    x = tl.where(x == 0.0, 0.0, x)  # -0.0 ties with 0.0
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    # Above the negated index stand the float's bits as an integer of the same order.
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0x7FFFFFFF - expert).to(tl.int64)
    key = tl.where(real, key, NEVER)
    place = tl.sum((key[:, None] > key[None, :]).to(tl.int32), axis=0)
    chosen = real & (place < TOP_K)
    largest = tl.sum(tl.where(place == 0, x, 0.0), axis=0)
    p = tl.where(chosen, tl.exp(x - largest), 0.0)
    weights = p / tl.sum(p, axis=0) * scale
    tl.store(ids_ptr + place, expert, mask=chosen)
    tl.store(weights_ptr + place, weights, mask=chosen)


@triton.jit
def _mxfp8(v, BLOCK: tl.constexpr):
    """float32 ``[BLOCK]`` → E4M3 codes ``[BLOCK / 32, 32]`` and scale bytes, by the rules of ``formats``.

    The codes are made by bits: GPUs before SM 8.9 have no conversion, and the pass is bound by memory anyway.
    """
    v = v.reshape(BLOCK // 32, 32)
    exponent = (v.to(tl.uint32, bitcast=True) & 0x7FFFFFFF).to(tl.int32, bitcast=True) >> 23
    largest = tl.max(exponent, axis=1)
    finite = largest < 255
    scale = tl.where(finite, tl.maximum(largest - 8, 0), 255)
    factor = tl.where(finite, (254 - scale) << 23, 0).to(tl.float32, bitcast=True)
    scaled = tl.where(finite[:, None], v, 0.0) * factor[:, None]
    return round_e4m3(scaled, True), scale.to(tl.uint8)


@triton.jit
def rms_norm(
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, scales_ptr, epsilon, width, stride_x, stride_residual,
    BLOCK: tl.constexpr, TOP_K: tl.constexpr, ADD: tl.constexpr, WEIGHTED: tl.constexpr, MXFP8: tl.constexpr,
    PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens,). ``out = norm(x) * weight``, or of ``sum = x + residual`` if ADD; in MXFP8 if so wished.

    TOP_K: ``x`` is the sum of so many rows of float32 that stand together, what a token's experts answered; 0: it is
    there already.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    if WEIGHTED:
        weight = _load(weight_ptr, column, mask)
    if PDL:  # the weight was there before; the tokens come from the kernel before
        let_next_begin_and_wait()
    if TOP_K > 0:
        x = _summed(x_ptr + token * stride_x, column, mask, width, TOP_K, PLAIN)
    else:
        x = _load(x_ptr + token * stride_x, column, mask)
    if ADD:
        x += _load(residual_ptr + token * stride_residual, column, mask)
        x = _rounded(x, PLAIN)  # the norm is of what the residual stream will hold
        tl.store(sum_ptr + token * width + column, to_bf16(x, PLAIN), mask=mask)
    y = _normed(x, width, epsilon)
    if WEIGHTED:
        y *= weight
    if MXFP8:
        codes, scales = _mxfp8(_rounded(y, PLAIN), BLOCK)
        tl.store(out_ptr + token * width + column, codes.reshape(BLOCK), mask=mask)
        group = tl.arange(0, BLOCK // 32)
        tl.store(scales_ptr + token * (width // 32) + group, scales, mask=group < width // 32)
    else:
        tl.store(out_ptr + token * width + column, to_bf16(y, PLAIN), mask=mask)


@triton.jit
def norm_add_norm(
    x_ptr, x_weight_ptr, other_ptr, other_weight_ptr, joined_weight_ptr, residual_ptr, weights_ptr, sum_ptr, out_ptr,
    epsilon, scale, width, BLOCK: tl.constexpr, JOIN: tl.constexpr, OUTPUTS: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens,). What stands between two blocks of a model that norms before and after it adds (Gemma 4).

    ``sum = (residual + norm(x) * weight) * scale``; if JOIN, what is added is ``norm(norm(x) * weight + norm(other) *
    weight) * weight``. Then ``norm(sum)`` times each of OUTPUTS weights, to ``out [OUTPUTS, tokens, width]``.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    row = token * width
    # Weights before the wait: they are there already. Behind it each would be a trip to memory of its own, for no load
    # passes the barrier of a sum.
    x_weight = _early(x_weight_ptr, column, mask, EARLY)
    if JOIN:
        other_weight = _early(other_weight_ptr, column, mask, EARLY)
        joined_weight = _early(joined_weight_ptr, column, mask, EARLY)
    weights = ()
    for i in tl.static_range(OUTPUTS):
        weights = weights + (_early(weights_ptr + i * width, column, mask, EARLY),)
    if PDL:
        let_next_begin_and_wait()
    residual = tl.load(residual_ptr + row + column, mask=mask, other=0.0)
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0)
    if JOIN:
        other = tl.load(other_ptr + row + column, mask=mask, other=0.0)
        y, other = _normed_both(x.to(tl.float32), other.to(tl.float32), width, epsilon)
        y = _rounded(y * _weight(x_weight, x_weight_ptr, column, mask, EARLY), PLAIN)
        y += _rounded(other * _weight(other_weight, other_weight_ptr, column, mask, EARLY), PLAIN)
        y = _normed(_rounded(y, PLAIN), width, epsilon)
        y *= _weight(joined_weight, joined_weight_ptr, column, mask, EARLY)
    else:
        y = _normed(x.to(tl.float32), width, epsilon) * _weight(x_weight, x_weight_ptr, column, mask, EARLY)
    total = _rounded(_rounded(residual.to(tl.float32) + _rounded(y, PLAIN), PLAIN) * scale, PLAIN)
    tl.store(sum_ptr + row + column, to_bf16(total, PLAIN), mask=mask)
    normed = _normed(total, width, epsilon)
    for i in tl.static_range(OUTPUTS):
        weight = _weight(weights[i], weights_ptr + i * width, column, mask, EARLY)
        at = out_ptr + (i * tl.num_programs(0) + token) * width + column
        tl.store(at, to_bf16(normed * weight, PLAIN), mask=mask)


@triton.jit(do_not_specialize=["num_experts"])
def norm_add_norm_route(
    x_ptr, x_weight_ptr, residual_ptr, norms_ptr, router_ptr, expert_scale_ptr, sum_ptr, out_ptr, logits_ptr, ids_ptr,
    weights_ptr, counters_ptr, epsilon, scale, width, num_experts, BLOCK: tl.constexpr, READERS: tl.constexpr,
    ROWS: tl.constexpr, TOP_K: tl.constexpr, E_PAD: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of ROWS experts). ``norm_add_norm`` of one part for READERS weights, and with the weight
    after them router and top-k: few tokens in one launch, as in ``add_norm_route``.

    There are more than READERS blocks. Each of the first stores one norm, the next one the sum, all of them after they
    have counted: to count waits for what was stored before, and the last program's choice for every count.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    row = token * width
    expert = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = expert < num_experts
    # Weights before the wait: they are there already, and reading them is most of the work.
    rows = router_ptr + expert[:, None].to(tl.int64) * width + column[None, :]
    router = tl.load(rows, mask=real[:, None] & mask[None, :], other=0.0)
    x_weight = _load(x_weight_ptr, column, mask)
    router_norm = _load(norms_ptr + READERS * width, column, mask)
    part = tl.program_id(1)
    norm_mask = mask & (part < READERS)
    reader_norm = _load(norms_ptr + part * width, column, norm_mask)
    every = tl.arange(0, E_PAD)
    expert_scale = tl.load(expert_scale_ptr + every, mask=every < num_experts, other=0.0)
    if PDL:
        let_next_begin_and_wait()
    x = tl.load(x_ptr + row + column, mask=mask, other=0.0)
    residual = tl.load(residual_ptr + row + column, mask=mask, other=0.0)  # now: no load passes the barrier of a sum
    y = _rounded(_normed(x.to(tl.float32), width, epsilon) * x_weight, PLAIN)
    total = _rounded(_rounded(residual.to(tl.float32) + y, PLAIN) * scale, PLAIN)
    normed = _normed(total, width, epsilon)
    seen = _rounded(normed * router_norm, PLAIN)
    logits = tl.sum(router.to(tl.float32) * seen[None, :], axis=1)
    tl.store(logits_ptr + token * num_experts + expert, logits, mask=real)
    # The barrier puts every thread's stores before the one thread that counts, and that one releases them.
    tl.debug_barrier()
    finished = tl.atomic_add(counters_ptr + token, 1, sem="acq_rel", scope="gpu")
    out = out_ptr + (part * tl.num_programs(0) + token) * width + column
    tl.store(out, to_bf16(normed * reader_norm, PLAIN), mask=norm_mask)
    tl.store(sum_ptr + row + column, to_bf16(total, PLAIN), mask=mask & (part == READERS))
    if finished == tl.num_programs(1) - 1:
        tl.store(counters_ptr + token, 0)
        chosen = token * TOP_K
        _choose_ranked(
            logits_ptr + token * num_experts, expert_scale, ids_ptr + chosen, weights_ptr + chosen, num_experts,
            TOP_K, E_PAD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_experts"])
def add_norm_route(
    x_ptr, residual_ptr, weight_ptr, router_ptr, bias_ptr, sum_ptr, out_ptr, logits_ptr, ids_ptr, weights_ptr,
    counters_ptr, epsilon, width, num_experts, stride_x, stride_residual,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, TOP_K: tl.constexpr, E_PAD: tl.constexpr, BIAS: tl.constexpr,
    ALWAYS: tl.constexpr, K_PAD: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of ROWS experts). Sum, norm, router and top-k of few tokens in one launch. ALWAYS: the last
    expert has the last of the TOP_K slots, by the sigmoid of its logit; E_PAD holds the others.

    Every program of a token adds and norms it again, which costs less than a launch; the last one with its logits
    chooses. The first block stores the norm and the last one the sum, after they have counted, as in
    ``norm_add_norm_route``.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    expert = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = expert < num_experts
    # Weights before the wait: they are there already, and reading them is most of the work.
    rows = router_ptr + expert[:, None].to(tl.int64) * width + column[None, :]
    router = tl.load(rows, mask=real[:, None] & mask[None, :], other=0.0)
    weight = _load(weight_ptr, column, mask)
    if BIAS:
        bias = tl.load(bias_ptr + expert, mask=real, other=0.0).to(tl.float32)
    if PDL:
        let_next_begin_and_wait()
    x = _load(x_ptr + token * stride_x, column, mask) + _load(residual_ptr + token * stride_residual, column, mask)
    x = _rounded(x, PLAIN)
    y = _rounded(_normed(x, width, epsilon) * weight, PLAIN)
    logits = tl.sum(router.to(tl.float32) * y[None, :], axis=1)
    if BIAS:
        logits += bias
    tl.store(logits_ptr + token * num_experts + expert, logits, mask=real)
    # The barrier puts every thread's stores before the one thread that counts, and that one releases them.
    tl.debug_barrier()
    finished = tl.atomic_add(counters_ptr + token, 1, sem="acq_rel", scope="gpu")
    at = token * width + column
    tl.store(out_ptr + at, to_bf16(y, PLAIN), mask=mask & (tl.program_id(1) == 0))
    tl.store(sum_ptr + at, to_bf16(x, PLAIN), mask=mask & (tl.program_id(1) == tl.num_programs(1) - 1))
    if finished == tl.num_programs(1) - 1:
        tl.store(counters_ptr + token, 0)
        chosen = token * TOP_K
        if ALWAYS:  # so many experts that all comparisons at once would not fit in registers
            row = tl.program_id(0) + tl.arange(0, 1)
            choose(
                logits_ptr, logits_ptr, ids_ptr, weights_ptr, row, tl.num_programs(0), num_experts - 1, num_experts,
                TOP_K, K_PAD, E_PAD, False, True,
            )  # fmt: skip
        else:
            one = tl.full([E_PAD], 1.0, tl.float32)
            _choose_ranked(
                logits_ptr + token * num_experts, one, ids_ptr + chosen, weights_ptr + chosen, num_experts, TOP_K, E_PAD
            )
