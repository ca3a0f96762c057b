"""The jit code of ``triton_small``: norms and rotary positions, each one pass over its data."""

import triton
import triton.language as tl

from microscale.kernels.plain_jit import to_bf16


@triton.jit
def rms_norm(
    x_ptr, weight_ptr, out_ptr, epsilon, width, stride_x, stride_out, BLOCK: tl.constexpr, PLAIN: tl.constexpr
):
    """Grid: (tokens,). ``out = x / sqrt(mean(x**2) + epsilon) * weight`` with float32 inside."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < width
    x = tl.load(x_ptr + token * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    tl.store(out_ptr + token * stride_out + column, to_bf16(x * norm * weight, PLAIN), mask=mask)


@triton.jit
def rope_and_write_kv(
    qkv_ptr, positions_ptr, frequencies_ptr, slots_ptr, q_ptr, k_ptr, v_ptr, scale, heads, kv_heads, page_size,
    stride_page, stride_kv_head, BLOCK_H: tl.constexpr, HALF: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, blocks of heads). Rotates q to ``q_ptr`` and k into the cache, and copies v there.

    A head's first and second halves are read once each; dimension i turns with i + HALF.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    pair = tl.arange(0, HALF)
    total = heads + 2 * kv_heads
    source = qkv_ptr + (token * total + head)[:, None] * (2 * HALF) + pair[None, :]
    inside = (head < total)[:, None]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)

    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(frequencies_ptr + pair)
    turned = (head < heads + kv_heads)[:, None]
    cos = tl.where(turned, (tl.cos(angle) * scale)[None, :], 1.0)
    sin = tl.where(turned, (tl.sin(angle) * scale)[None, :], 0.0)
    low = to_bf16(first * cos - second * sin, PLAIN)
    high = to_bf16(second * cos + first * sin, PLAIN)

    is_query = (head < heads)[:, None]
    target = q_ptr + (token * heads + head)[:, None] * (2 * HALF) + pair[None, :]
    tl.store(target, low, mask=is_query)
    tl.store(target + HALF, high, mask=is_query)

    slot = tl.load(slots_ptr + token)
    base = slot // page_size * stride_page + slot % page_size * (2 * HALF)
    kv_head = (head - heads) % kv_heads
    place = (base + kv_head * stride_kv_head)[:, None] + pair[None, :]
    is_key = turned & (head >= heads)[:, None]
    tl.store(k_ptr + place, low, mask=is_key)
    tl.store(k_ptr + place + HALF, high, mask=is_key)
    is_value = inside & (head >= heads + kv_heads)[:, None]
    tl.store(v_ptr + place, low, mask=is_value)
    tl.store(v_ptr + place + HALF, high, mask=is_value)
