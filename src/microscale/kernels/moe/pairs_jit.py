"""Jit code around the expert GEMMs: the work list of few (token, expert) pairs, and the sum of a token's experts."""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from microscale.kernels.fragments_jit import X_SCALE


@triton.jit
def fragment_columns(at):
    """The column that stands at ``at`` in a token that is prepared for ``wgmma`` in bf16."""
    return at // 32 * 32 + at // 2 % 4 * 8 + at // 8 % 4 * 2 + at % 2


@triton.jit(do_not_specialize=["pairs", "bound"])
def list_small_batch(
    ids_ptr,  # int32 [pairs]
    offsets_ptr,  # int32 [num_experts + 1]: an expert's first place
    tiles_ptr,  # int32 [bound, 4]: expert, first place, number of pairs, the expert's first tile; past the end -1
    order_ptr,  # int32 [pairs]: place → pair
    x_ptr,  # bf16 [tokens, width]
    scaled_ptr,  # bf16 [tokens, width or PADDED]: x times 2**64
    pairs,
    bound,
    num_experts,
    width,
    stride_x,
    PAIRS: tl.constexpr,  # the power of two from their number on
    EXPERTS: tl.constexpr,  # likewise
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,  # columns of a token that is prepared for ``wgmma``; 0: it stays in its order
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program per expert places its pairs and lists tiles of up to ``COLUMNS`` of them; one per token scales it.

    Every program counts all pairs itself, so none waits for another: one trip to memory, whatever the number of pairs.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    if pid < num_experts:
        i = tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + i, mask=i < pairs, other=0)
        e = tl.arange(0, EXPERTS)
        # Filling counts as expert 0: take it back.
        counts = tl.histogram(ids, EXPERTS) - tl.where(e == 0, PAIRS - pairs, 0)
        num_tiles = (counts + COLUMNS - 1) // COLUMNS
        first = tl.sum(tl.where(e < pid, counts, 0), axis=0)
        count = tl.sum(tl.where(e == pid, counts, 0), axis=0)
        entry = tl.sum(tl.where(e < pid, num_tiles, 0), axis=0)
        hit = ((ids == pid) & (i < pairs)).to(tl.int32)
        tl.store(order_ptr + first + tl.cumsum(hit, axis=0) - 1, i, mask=hit > 0)
        tl.store(offsets_ptr + pid, first)
        if pid == num_experts - 1:
            tl.store(offsets_ptr + num_experts, pairs)
        for done in range(0, count, COLUMNS):
            at = tiles_ptr + (entry + done // COLUMNS) * 4
            tl.store(at, pid)
            tl.store(at + 1, first + done)
            tl.store(at + 2, tl.minimum(count - done, COLUMNS))
            tl.store(at + 3, entry)
        if pid == 0:
            used = tl.sum(num_tiles, axis=0)
            for start in range(used, bound, EXPERTS):
                tl.store(tiles_ptr + (start + e) * 4, tl.full([EXPERTS], -1, tl.int32), mask=start + e < bound)
    else:
        token = pid - num_experts
        out_width = width if PADDED == 0 else PADDED
        for start in range(0, out_width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            column = at if PADDED == 0 else fragment_columns(at)
            x = tl.load(x_ptr + token * stride_x + column, mask=column < width, other=0.0)
            scaled = (x.to(tl.float32) * X_SCALE).to(tl.bfloat16)
            tl.store(scaled_ptr + token * out_width + at, scaled, mask=at < out_width)


@triton.jit
def combine(
    parts_ptr,  # [tokens * TOP_K, width], weights applied
    y_ptr,  # bf16 [tokens, width]
    width,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """``y[token] = sum of its TOP_K parts`` in float32, always in the same order."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(parts_ptr + (token * TOP_K + k) * width + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * width + column, total.to(tl.bfloat16), mask=ok)
