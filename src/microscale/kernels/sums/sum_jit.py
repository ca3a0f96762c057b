"""The jit code of sums over ranks: one program sends one row to all ranks and adds up what they sent. ``spec`` has the
protocol.

Flags are written and read by single loads and stores at the scope of the system, never by atomics: those may not be
atomic in another GPU's memory over PCIe, and a flag has one writer.
"""

# mypy: ignore-errors
# (Triton's language and not Python: arguments are tensors, pointers or constants by call.)

import triton
import triton.language as tl

from microscale.kernels.plain_jit import to_bf16
from microscale.kernels.small.norm_jit import _load, _normed, _rounded


@triton.jit
def _release(PLAIN: tl.constexpr):
    """What all threads have stored is there, for the whole system, before what the first thread stores next. The
    barrier before it puts their stores before that thread's fence."""
    tl.debug_barrier()
    if not PLAIN:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p fence.acq_rel.sys;
            mov.b32 $0, 0;
            }
            """,
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _set_flag(flag, epoch, PLAIN: tl.constexpr):
    """By the first thread."""
    if PLAIN:
        tl.store(flag, epoch)
    else:
        tl.inline_asm_elementwise(
            """
            {
            .reg .pred p;
            .reg .b32 t;
            mov.u32 t, %tid.x;
            setp.eq.u32 p, t, 0;
            @p st.relaxed.sys.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }
            """,
            "=r,l,r",
            [flag.to(tl.int64), epoch],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _read_flag(flag, PLAIN: tl.constexpr):
    """By every thread: each may then read what was there before the flag."""
    if PLAIN:
        return tl.load(flag, volatile=True)
    else:
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b32 $0, [$1];",
            "=r,l",
            [flag.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["rank"])
def sum_rows(
    part_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, own_ptr, p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr,
    p6_ptr, p7_ptr, epochs_ptr, epsilon, rank, width, WORLD: tl.constexpr, SENDERS: tl.constexpr, DATA_AT: tl.constexpr,
    ROW_BYTES: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Grid: (rows,). ``sum``: over all ranks' parts. With NORM it is added to the residual stream, and ``out`` is the
    norm of that times the weight; the same bits as ``small.norm_jit.rms_norm`` gives behind a sum.

    ``own`` is this rank's buffer, and ``p0`` to ``p7`` those of all ranks, of which the first WORLD are read.
    """
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < width
    at = row.to(tl.int64) * width + column
    kind = part_ptr.dtype
    epoch = tl.load(epochs_ptr + row) + 1
    half = DATA_AT + (row * 2 + (epoch & 1)).to(tl.int64) * (WORLD * ROW_BYTES)
    flags = (row * (SENDERS * 4)).to(tl.int64)
    part = tl.load(part_ptr + at, mask=mask, other=0.0)
    peers = (p0_ptr, p1_ptr, p2_ptr, p3_ptr, p4_ptr, p5_ptr, p6_ptr, p7_ptr)
    for peer in tl.static_range(WORLD):
        slot = (peers[peer] + half + rank.to(tl.int64) * ROW_BYTES).to(kind)
        tl.store(slot + column, part, mask=mask)
    if NORM:  # while the flags are on their way
        residual = _load(residual_ptr + row.to(tl.int64) * width, column, mask)
        weight = _load(weight_ptr, column, mask)
    _release(PLAIN)
    for peer in tl.static_range(WORLD):
        _set_flag((peers[peer] + flags + rank * 4).to(tl.pointer_type(tl.int32)), epoch, PLAIN)
    for peer in tl.static_range(WORLD):
        flag = (own_ptr + flags + peer * 4).to(tl.pointer_type(tl.int32))
        seen = _read_flag(flag, PLAIN)
        while seen - epoch < 0:
            seen = _read_flag(flag, PLAIN)
    tl.debug_barrier()  # all threads have read the epoch, and may read the slots
    tl.store(epochs_ptr + row, epoch)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in tl.static_range(WORLD):
        slot = (own_ptr + half + peer * ROW_BYTES).to(kind)
        total += tl.load(slot + column, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        x = _rounded(_rounded(total, PLAIN) + residual, PLAIN)
        tl.store(sum_ptr + at, to_bf16(x, PLAIN), mask=mask)
        tl.store(out_ptr + at, to_bf16(_normed(x, width, epsilon) * weight, PLAIN), mask=mask)
    elif kind.element_ty == tl.bfloat16:
        tl.store(sum_ptr + at, to_bf16(total, PLAIN), mask=mask)
    else:
        tl.store(sum_ptr + at, total, mask=mask)
