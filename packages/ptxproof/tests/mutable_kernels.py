"""A kernel in which each operator of ``ptxproof.mutate`` finds something, and one that waits for launches before it."""

# mypy: ignore-errors

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def half(x):
    return x / 2


@triton.jit
def halved_rows(x_ptr, y_ptr, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """y [rows] = the sum of half of each row of x [rows, width], in bf16."""
    tl.static_assert(BLOCK > 1)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for block in range((width + BLOCK - 1) // BLOCK):
        at = block * BLOCK + tl.arange(0, BLOCK)
        total += half(tl.load(x_ptr + row * width + at, mask=at < width, other=0.0))
    if WIDE:
        total = total + 1
    tl.debug_barrier()
    tl.store(y_ptr + row, tl.sum(total, axis=0).to(tl.bfloat16))


@triton.jit
def doubled_after_wait(x_ptr, y_ptr, EARLY: tl.constexpr, WAITS: tl.constexpr, BLOCK: tl.constexpr):
    """y = 2 x, as a dependent launch: ``EARLY`` lets the next one begin first."""
    at = tl.arange(0, BLOCK)
    if EARLY:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))
