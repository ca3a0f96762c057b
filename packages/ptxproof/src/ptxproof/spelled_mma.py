"""Matrix products of 8-bit floats, with and without block scales, spelled out as products of f16.

An ``m16n8k32`` of E4M3 or E5M2 becomes two ``m16n8k16`` of f16, which holds both exactly. Lane ``4 g + t`` of the 8-bit
product holds columns ``4 t .. 4 t + 3`` and ``16 + 4 t .. 16 + 4 t + 3`` of rows ``g`` and ``g + 8`` of A, and the same
rows of column ``g`` of B. The order of k does not matter as long as A and B share it, so each lane's own four
neighbours become its two pairs of the f16 product, and no value crosses lanes.

Scales (PTX manual, "Block scaling for mma.sync"; CUTLASS' traits of SM120_16x8x32_TN_VS say the same): A's are in the
lanes with ``lane % 4 = 2 * thread_id`` (rows ``g``) and the next (rows ``g + 8``), B's in those with ``lane % 4 =
thread_id`` (columns ``g``); ``byte_id`` picks the byte. A byte ``e`` is ``2 ** (e - 127)``, 255 is NaN.
"""

from __future__ import annotations

import re

from ptxproof.errors import BadPtx
from ptxproof.ptx import PtxInstruction, vector

_FP8 = {"e4m3", "e5m2"}
_SCALED = re.compile(
    r"mma\.sync\.aligned\.m16n8k32\.row\.col\.kind::mxf8f6f4\.block_scale(?:\.scale_vec::1X)?"
    r"\.f32\.(?P<a>\w+)\.(?P<b>\w+)\.f32\.ue8m0"
)
_PLAIN = re.compile(r"mma\.sync\.aligned\.m16n8k32\.row\.col\.f32\.(?P<a>\w+)\.(?P<b>\w+)\.f32")
_F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
_SUMS = "{%sp0, %sp1, %sp2, %sp3}"


def fp8_mma(instruction: PtxInstruction) -> list[str]:
    """``d = a b + c``."""
    d, a, b, c = (vector(operand) for operand in instruction.operands)
    lines = [".reg .b32 %sp<4>;", *(f"mov.b32 %sp{at}, {name};" for at, name in enumerate(c))]
    lines += _products(instruction, _PLAIN, a, b)
    return [*lines, *(f"mov.b32 {name}, %sp{at};" for at, name in enumerate(d))]


def block_scaled_mma(instruction: PtxInstruction) -> list[str]:
    """``d = (a b) * scale of row * scale of column + c``: one scale for all 32 of k."""
    d, a, b, c = (vector(operand) for operand in instruction.operands[:4])
    scale_a, picked_a, scale_b, picked_b = instruction.operands[4:]
    byte_a, thread_a = _picked(instruction, picked_a)
    byte_b, thread_b = _picked(instruction, picked_b)
    lines = [".reg .b32 %sp<4>;", *(f"mov.b32 %sp{at}, 0;" for at in range(4))]
    lines += _products(instruction, _SCALED, a, b)
    lines += [
        ".reg .b32 %slane, %sfrom, %se<4>, %sexp, %shigh, %slow, %ssum;",
        ".reg .pred %snan;",
        "mov.u32 %slane, %laneid;",
        "and.b32 %sfrom, %slane, 28;",  # 4 g
        f"add.u32 %sfrom, %sfrom, {2 * thread_a};",
        *_scale("%se0", scale_a, byte_a),
        "add.u32 %sfrom, %sfrom, 1;",
        *_scale("%se1", scale_a, byte_a),
        "and.b32 %sfrom, %slane, 3;",
        "shl.b32 %sfrom, %sfrom, 3;",  # columns 2 t and 2 t + 1: lanes 8 t and 8 t + 4
        f"add.u32 %sfrom, %sfrom, {thread_b};",
        *_scale("%se2", scale_b, byte_b),
        "add.u32 %sfrom, %sfrom, 4;",
        *_scale("%se3", scale_b, byte_b),
    ]
    for at in range(4):
        lines += _scaled_sum(at, f"%se{at // 2}", f"%se{2 + at % 2}", c[at], d[at])
    return lines


def _products(instruction: PtxInstruction, form: re.Pattern[str], a: list[str], b: list[str]) -> list[str]:
    """The sums of ``a b`` on top of what ``%sp`` holds."""
    types = form.fullmatch(instruction.opcode)
    if types is None or not {types["a"], types["b"]} <= _FP8:
        raise BadPtx(f"{instruction.opcode} is not spelled out: no kernel uses it.")
    lines = [".reg .b32 %sa<8>, %sb<4>;", ".reg .b16 %shalf<2>;"]
    # a[0] and a[1] are rows g and g + 8 of the first 16 of k, a[2] and a[3] of the rest.
    for source, first, second in ((a[0], 0, 2), (a[1], 1, 3), (a[2], 4, 6), (a[3], 5, 7)):
        lines += _halves(types["a"], source, f"%sa{first}", f"%sa{second}")
    lines += _halves(types["b"], b[0], "%sb0", "%sb1")
    lines += _halves(types["b"], b[1], "%sb2", "%sb3")
    lines.append(f"{_F16} {_SUMS}, {{%sa0, %sa1, %sa2, %sa3}}, {{%sb0, %sb1}}, {_SUMS};")
    lines.append(f"{_F16} {_SUMS}, {{%sa4, %sa5, %sa6, %sa7}}, {{%sb2, %sb3}}, {_SUMS};")
    return lines


def _halves(kind: str, source: str, low: str, high: str) -> list[str]:
    return [
        f"mov.b32 {{%shalf0, %shalf1}}, {source};",
        f"cvt.rn.f16x2.{kind}x2 {low}, %shalf0;",
        f"cvt.rn.f16x2.{kind}x2 {high}, %shalf1;",
    ]


def _picked(instruction: PtxInstruction, operand: str) -> tuple[int, int]:
    parts = vector(operand)
    if not all(part.isdecimal() for part in parts):
        raise BadPtx(f"{instruction} picks its scales by a register, which is not spelled out: no kernel does.")
    byte, thread = map(int, parts)
    return byte, thread


def _scale(result: str, source: str, byte: int) -> list[str]:
    """The exponent's byte in the lane ``%sfrom``."""
    return [f"shfl.sync.idx.b32 {result}, {source}, %sfrom, 31, -1;", f"bfe.u32 {result}, {result}, {8 * byte}, 8;"]


def _scaled_sum(at: int, row: str, column: str, c: str, d: str) -> list[str]:
    """Times ``2 ** (row + column - 254)`` in two steps of half of that, so that neither ends outside of float32 unless
    the product does: a sum of E4M3 products lies between 2**-18 and 2**23."""
    lines = [
        f"add.u32 %sexp, {row}, {column};",
        "shr.u32 %slow, %sexp, 1;",
        "sub.u32 %shigh, %sexp, %slow;",
    ]
    for name in ("%slow", "%shigh"):
        # An exponent of 0 is a subnormal 2**-127.
        lines += [f"shl.b32 {name}, {name}, 23;", f"max.u32 {name}, {name}, 0x400000;"]
    return [
        *lines,
        f"max.u32 %sexp, {row}, {column};",
        "setp.eq.u32 %snan, %sexp, 255;",
        "selp.b32 %slow, 0x7FFFFFFF, %slow, %snan;",
        f"mul.rn.f32 %ssum, %sp{at}, %slow;",
        f"fma.rn.f32 {d}, %ssum, %shigh, {c};",
    ]
