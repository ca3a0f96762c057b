"""Jit code of the logits epilogue: of each block of rows the maximum, its first row and the sum of exponentials."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_summary(v, row, rows):
    """Logits float32 [M, R] of the rows ``row`` [R] → maximum, row of the maximum, sum of exp(v - maximum), each [M].

    One 64-bit maximum finds value and row: floats as ordered integers (adding 0 turns -0 into 0, NaN stands above all),
    and below them the complement of the row, so that among equals the lowest wins.
    """
    inside = (row < rows)[None, :]
    bits = (v + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(v != v, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    order = tl.where(inside, order, -0x80000000)
    key = (order.to(tl.int64) << 32) | (0x7FFFFFFF - row).to(tl.int64)[None, :]
    best = tl.max(key, axis=1)
    high = (best >> 32).to(tl.int32)
    largest = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
    total = tl.sum(tl.where(inside, tl.exp(v - largest[:, None]), 0.0), axis=1)
    return largest, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), total


@triton.jit
def summarise(
    values_ptr,  # float32 [tokens, rows]
    max_ptr,  # float32 [tokens, blocks]
    argmax_ptr,  # int32 [tokens, blocks]
    sum_ptr,  # float32 [tokens, blocks]
    rows,
    softcap,
    BLOCK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Logits that somebody else computed. Grid: (blocks of rows, tokens). CAPPED: they are capped first, in place."""
    token = tl.program_id(1)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at_row = values_ptr + token.to(tl.int64) * rows + row
    v = tl.load(at_row, mask=row < rows, other=0.0)
    if CAPPED:
        # tanh(z) = 1 - 2 / (1 + exp(2 z)): right at both ends, and within 2**-22 between; a NaN stays one.
        v = softcap * (1.0 - 2.0 / (1.0 + tl.exp(v * (2.0 / softcap))))
        tl.store(at_row, v, mask=row < rows)
    largest, first, total = block_summary(v[None, :], row, rows)
    at = token * tl.num_programs(0) + tl.program_id(0) + tl.arange(0, 1)
    tl.store(max_ptr + at, largest)
    tl.store(argmax_ptr + at, first)
    tl.store(sum_ptr + at, total)
