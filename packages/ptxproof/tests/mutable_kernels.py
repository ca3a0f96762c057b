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
def doubled_after_wait(
    x_ptr, y_ptr, EARLY: tl.constexpr, WAITS: tl.constexpr, BLOCK: tl.constexpr, LATE_BLOCK: tl.constexpr = -1
):
    """y = 2 x, as a dependent launch: ``EARLY`` lets the next one begin first, but for one block."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EARLY and tl.program_id(0) != LATE_BLOCK:
        gdc_launch_dependents()
    if WAITS:
        gdc_wait()
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


@triton.jit
def summed_by_the_last(
    x_ptr, parts_ptr, counter_ptr, y_ptr, SEM: tl.constexpr, SCOPE: tl.constexpr, BARRIER: tl.constexpr
):
    """Every program copies 64 numbers; the one that counts last adds up the copies."""
    at = tl.arange(0, 64)
    mine = tl.program_id(0) * 64 + at
    tl.store(parts_ptr + mine, tl.load(x_ptr + mine))
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem=SEM, scope=SCOPE) == tl.num_programs(0) - 1:
        tl.store(counter_ptr, 0)
        total = tl.zeros([64], tl.float32)
        for part in range(tl.num_programs(0)):
            total += tl.load(parts_ptr + part * 64 + at)
        tl.store(y_ptr + at, total)


@triton.jit
def row_of_another_thread(x_ptr, kept_ptr, y_ptr, BARRIER: tl.constexpr):
    at = tl.arange(0, 128)
    tl.store(kept_ptr + at, tl.load(x_ptr + at))
    if BARRIER:
        tl.debug_barrier()
    tl.store(y_ptr + at, tl.load(kept_ptr + 127 - at))


@triton.jit
def copied_rows(x_ptr, y_ptr, stride, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) if WIDE else tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    tl.store(y_ptr + row * stride + at, tl.load(x_ptr + row * stride + at, mask=inside), mask=inside)


@triton.jit
def grid_barrier(
    counter_ptr, target, RELEASE: tl.constexpr, ACQUIRE: tl.constexpr, BEFORE: tl.constexpr, BEHIND: tl.constexpr
):
    """Wait until ``target`` programs have counted."""
    if BEFORE:
        tl.debug_barrier()
    tl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .u32 t, v; mov.u32 t, %tid.x; setp.ne.u32 p, t, 0; @p bra DONE;"
        + RELEASE
        + " [$1], 1; WAIT: "
        + ACQUIRE
        + " v, [$1]; setp.lt.u32 q, v, $2; @q bra WAIT; DONE: mov.u32 $0, 0; }",
        "=r,l,r",
        [counter_ptr, target],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    if BEHIND:
        tl.debug_barrier()


@triton.jit
def layers_of_all(
    x_ptr,
    y_ptr,
    counter_ptr,
    layers,
    MISSING: tl.constexpr = 0,
    SHORT: tl.constexpr = 0,
    ABSENT: tl.constexpr = -1,
    RELEASE: tl.constexpr = "red.release.gpu.global.add.u32",
    ACQUIRE: tl.constexpr = "ld.acquire.gpu.global.u32",
    BEFORE: tl.constexpr = True,
    BEHIND: tl.constexpr = True,
):
    """Each layer: y = the sum of all programs' x, and half of a neighbour's y is the next x. ``SHORT``: programs that
    are not waited for; the program ``ABSENT`` does not count."""
    pid, count = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, 64)
    target = 0
    if pid != ABSENT:
        for _layer in range(layers):
            total = tl.zeros([64], tl.float32) + pid
            for part in range(count):
                total += tl.load(x_ptr + part * 64 + at)
            tl.store(y_ptr + pid * 64 + at, total)
            target += count - SHORT
            if MISSING != 1:
                grid_barrier(counter_ptr, target, RELEASE, ACQUIRE, BEFORE, BEHIND)
            # The other half of the numbers, so that threads read what other threads have written.
            tl.store(x_ptr + pid * 64 + at, tl.load(y_ptr + (pid + 1) % count * 64 + (at + 32) % 64) / 2)
            if MISSING != 2:
                target += count - SHORT
                grid_barrier(counter_ptr, target, RELEASE, ACQUIRE, BEFORE, BEHIND)
