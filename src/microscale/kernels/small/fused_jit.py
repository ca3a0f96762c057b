"""The jit code of ``triton_small`` for heads and gates: each one pass over its data."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from microscale.kernels.gate_jit import gated as activation
from microscale.kernels.kv_codes_jit import to_codes
from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16


@triton.jit
def _put(
    cache_ptr, place, low, high, scale_ptr, kv_head, stride_scale, mask,
    HALF: tl.constexpr, FP8: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Both halves of heads into the cache. In E4M3 they are divided by their head's scale and saturate at 448."""
    if FP8:
        scale = tl.load(scale_ptr + kv_head * stride_scale)[:, None]
        low = to_codes(low, scale, PLAIN)
        high = to_codes(high, scale, PLAIN)
    tl.store(cache_ptr + place, low, mask=mask)
    tl.store(cache_ptr + place + HALF, high, mask=mask)


@triton.jit
def weigh_head(x, weight, PLAIN: tl.constexpr):
    """Normed numbers times the norm's weight, rounded as a norm's answer is."""
    return to_bf16(x * weight.to(tl.float32), PLAIN).to(tl.float32)


@triton.jit
def turn(x, partner, cos, sin, PLAIN: tl.constexpr):
    """One half of a head turned, where ``partner`` is the other half, and ``sin`` is negative for the first."""
    return to_bf16(x * cos + partner * sin, PLAIN)


@triton.jit(
    do_not_specialize=["heads", "kv_heads", "page_size", "stride_scale"],
    do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"],
)
def rope_and_write_kv(
    qkv_ptr, positions_ptr, frequencies_ptr, slots_ptr, q_weight_ptr, k_weight_ptr, q_ptr, k_ptr, v_ptr,
    k_scale_ptr, v_scale_ptr, scale, epsilon, heads, kv_heads, page_size, stride_page, stride_kv_head, stride_scale,
    stride_qkv, BLOCK_H: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, NORM_V: tl.constexpr,
    SHARED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of heads). Rotates q to ``q_ptr`` and k into the cache, and copies v there.

    A head's first and second halves are read once each; dimension i turns with i + HALF, and stays where its frequency
    is 0. NORM: q and k are normed first, with weights. NORM_V: and v, without one. SHARED: there is no v, and k before
    weight and rotation stands for it.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, HALF)
    # Weights were there before, and positions and slots come with the step: only ``qkv`` is the kernel before's.
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + pair)
    slot = tl.load(slots_ptr + token)
    if NORM:
        q_low = tl.load(q_weight_ptr + pair)
        q_high = tl.load(q_weight_ptr + HALF + pair)
        k_low = tl.load(k_weight_ptr + pair)
        k_high = tl.load(k_weight_ptr + HALF + pair)
    cos = (tl.cos(angle) * scale)[None, :]
    sin = (tl.sin(angle) * scale)[None, :]
    if PDL:
        # In this order: attention's many programs beside QKV's last ones cost more than they gain (H200, one token, 24
        # layers of gpt-oss-20b, with attention in a launch of its own: 1080 us, 1158 the other way round).
        gdc_wait()
        gdc_launch_dependents()
    total = heads + kv_heads if SHARED else heads + 2 * kv_heads
    source = qkv_ptr + token * stride_qkv + head[:, None] * (2 * HALF) + pair[None, :]
    inside = (head < total)[:, None]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    is_query = (head < heads)[:, None]
    turned = (head < heads + kv_heads)[:, None]
    v_first = first
    v_second = second
    if NORM:
        factor = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / (2 * HALF) + epsilon)[:, None]
        first *= factor
        second *= factor
        if NORM_V:
            v_first = first
            v_second = second
    v_first = to_bf16(v_first, PLAIN)
    v_second = to_bf16(v_second, PLAIN)
    if NORM:
        first = weigh_head(first, tl.where(is_query, q_low[None, :], k_low[None, :]), PLAIN)
        second = weigh_head(second, tl.where(is_query, q_high[None, :], k_high[None, :]), PLAIN)

    low = turn(first, second, cos, -sin, PLAIN)
    high = turn(second, first, cos, sin, PLAIN)

    target = q_ptr + (token * heads + head)[:, None] * (2 * HALF) + pair[None, :]
    tl.store(target, low, mask=is_query)
    tl.store(target + HALF, high, mask=is_query)

    base = slot // page_size * stride_page + slot % page_size * (2 * HALF)
    kv_head = tl.where(head < heads, 0, (head - heads) % kv_heads)
    place = (base + kv_head * stride_kv_head)[:, None] + pair[None, :]
    is_key = turned & (head >= heads)[:, None]
    is_value = is_key if SHARED else inside & (head >= heads + kv_heads)[:, None]
    if FP8:  # codes are more work than all of the above, and most blocks hold queries alone
        if (tl.program_id(1) + 1) * BLOCK_H > heads:
            if SHARED:
                _put(k_ptr, place, low, high, k_scale_ptr, kv_head, stride_scale, is_key, HALF, FP8, PLAIN)
                _put(v_ptr, place, v_first, v_second, v_scale_ptr, kv_head, stride_scale, is_value, HALF, FP8, PLAIN)
            else:  # a head is a key or a value: one code for each number
                cache = tl.where(head < heads + kv_heads, k_ptr, v_ptr)[:, None]
                scales = tl.where(head < heads + kv_heads, k_scale_ptr, v_scale_ptr)
                low = tl.where(turned, low, v_first)
                high = tl.where(turned, high, v_second)
                written = is_key | is_value
                _put(cache, place, low, high, scales, kv_head, stride_scale, written, HALF, FP8, PLAIN)
    else:
        _put(k_ptr, place, low, high, k_scale_ptr, kv_head, stride_scale, is_key, HALF, FP8, PLAIN)
        _put(v_ptr, place, v_first, v_second, v_scale_ptr, kv_head, stride_scale, is_value, HALF, FP8, PLAIN)


@triton.jit
def gate_heads(
    x_ptr, gate_ptr, out_ptr, width, stride_gate, BLOCK: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr
):
    """Grid: (tokens, blocks of columns). What attention gives, times the sigmoid of its gate."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    if PDL:
        let_next_begin_and_wait()
    gate = tl.load(gate_ptr + token * stride_gate + column, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + token * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + column, to_bf16(x * tl.sigmoid(gate), PLAIN), mask=mask)


@triton.jit
def gated(
    x_ptr, out_ptr, units, stride_x, BLOCK: tl.constexpr, GATE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of units). The gated activation between the two matrices of a dense MLP.

    RUN: how many gates stand before as many ups; 0 where all of them do.
    """
    token = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = unit < units
    row = x_ptr + token * stride_x
    if PDL:
        let_next_begin_and_wait()
    if RUN > 0:
        place = unit // RUN * (2 * RUN) + unit % RUN
        gate = tl.load(row + place, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row + place + RUN, mask=mask, other=0.0).to(tl.float32)
    else:
        gate = tl.load(row + unit, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row + units + unit, mask=mask, other=0.0).to(tl.float32)
    y = activation(gate, up, GATE, ALPHA, LIMIT)
    tl.store(out_ptr + token * units + unit, to_bf16(y, PLAIN), mask=mask)
