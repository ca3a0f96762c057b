"""The jit code of a draft head's pass that no model has: what it reads at its beginning, what it guesses at its end."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.pdl_jit import let_next_begin_and_wait
from microscale.kernels.plain_jit import to_bf16

LEAST = tl.constexpr(-(2**31))
"""Below the keys of all numbers."""
NO_BLOCK = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["stride_ids"], do_not_specialize_on_alignment=["ids_ptr"])
def norm_pair(
    table_ptr, ids_ptr, hidden_ptr, weights_ptr, out_ptr, epsilon, width, stride_ids, stride_hidden,
    BLOCK: tl.constexpr, PDL: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, 2). Norms of a token's row of the table and of its hidden state, side by side."""
    token, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < width
    weight = tl.load(weights_ptr + half * width + column, mask=mask, other=0.0)
    if PDL:  # the weights were there before; tokens and states come from the kernels before
        let_next_begin_and_wait()
    if half == 0:
        row = tl.load(ids_ptr + token * stride_ids)
        x = tl.load(table_ptr + row * width + column, mask=mask, other=0.0)
    else:
        x = tl.load(hidden_ptr + token * stride_hidden + column, mask=mask, other=0.0)
    x = x.to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon) * weight.to(tl.float32)
    tl.store(out_ptr + (2 * token + half) * width + column, to_bf16(y, PLAIN), mask=mask)


@triton.jit(
    do_not_specialize=["blocks", "stride_out"],
    do_not_specialize_on_alignment=["max_ptr", "argmax_ptr", "out_ptr"],
)
def likeliest(
    max_ptr, argmax_ptr, target_ids_ptr, out_ptr, blocks, stride_out, BLOCK: tl.constexpr, MAPPED: tl.constexpr
):
    """Grid: (tokens,). The row of the largest logit, the lowest of equals; NaN is above all, as torch has it.

    It waits for all before it: the next pass of a head reads keys of this one before it waits for anything.
    """
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LEAST, tl.int32)
    at = tl.full([BLOCK], NO_BLOCK, tl.int32)
    for start in range(0, blocks, BLOCK):
        block = start + lane
        x = tl.load(max_ptr + token * blocks + block, mask=block < blocks, other=0.0)
        x = tl.where(x == 0.0, 0.0, x)  # -0.0 ties with 0.0
        bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
        # The float's bits as an integer of the same order.
        key = tl.where(block < blocks, bits ^ ((bits >> 31) & 0x7FFFFFFF), LEAST)
        at = tl.where(key > best, block, at)
        best = tl.maximum(key, best)
    largest = tl.max(best, axis=0)
    found = tl.min(tl.where(best == largest, at, NO_BLOCK), axis=0)
    row = tl.load(argmax_ptr + token * blocks + found).to(tl.int64)
    if MAPPED:
        row = tl.load(target_ids_ptr + row)
    tl.store(out_ptr + token * stride_out, row)
