"""Matrix products of 8-bit floats, with and without block scales, and of NVFP4, spelled out as products of f16.

An ``m16n8k32`` of E4M3 or E5M2 becomes two ``m16n8k16`` of f16, which holds both exactly. Lane ``4 g + t`` of the 8-bit
product holds columns ``4 t .. 4 t + 3`` and ``16 + 4 t .. 16 + 4 t + 3`` of rows ``g`` and ``g + 8`` of A, and the same
rows of column ``g`` of B. The order of k does not matter as long as A and B share it, so each lane's own four
neighbours become its two pairs of the f16 product, and no value crosses lanes.

Scales (PTX manual, "Block scaling for mma.sync"; CUTLASS' traits of SM120_16x8x32_TN_VS say the same): A's are in the
lanes with ``lane % 4 = 2 * thread_id`` (rows ``g``) and the next (rows ``g + 8``), B's in those with ``lane % 4 =
thread_id`` (columns ``g``); ``byte_id`` picks the byte. A byte ``e`` is ``2 ** (e - 127)``, 255 is NaN.

An NVFP4 product is one of 64 E2M1, with four scales for each row and column. Along k, lane ``4 g + t`` holds ``8 t ..
8 t + 7`` and ``32 + 8 t .. 32 + 8 t + 7``. Byte ``j`` of a word of scales is that of ``16 j .. 16 j + 15``, in UE4M3
(E4M3 without a sign). The lanes that hold them are those above.
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
    words, (byte_a, byte_b) = _scale_words(instruction)
    lines = [".reg .b32 %sp<4>;", *(f"mov.b32 %sp{at}, 0;" for at in range(4))]
    lines += _products(instruction, _SCALED, a, b)
    lines += [*words, ".reg .b32 %sexp, %shigh, %slow, %ssum;", ".reg .pred %snan;"]
    for at, byte in enumerate((byte_a, byte_a, byte_b, byte_b)):
        lines.append(f"bfe.u32 %se{at}, %se{at}, {8 * byte}, 8;")
    for at in range(4):
        lines += _scaled_sum(at, f"%se{at // 2}", f"%se{2 + at % 2}", c[at], d[at])
    return lines


def nvfp4_mma(instruction: PtxInstruction) -> list[str]:
    """``d = (a b) * scale of row * scale of column``, summed over four groups of 16 along k, ``+ c``.

    Two of four lanes hold a group, the others one that has other scales. So there is a product for each group, in which
    B is zero in the other lanes. Its sums are exact, 12 bits, and so are they times two scales of 4 bits. Only the
    sums over the groups are rounded.
    """
    d, a, b, c = (vector(operand) for operand in instruction.operands[:4])
    words, picked = _scale_words(instruction)
    if any(picked):
        raise BadPtx("all four bytes of a scale are used, and the byte-id is not 0.")
    lines = [
        ".reg .b32 %sa<8>, %sb<4>, %sc<4>, %sp<4>, %st<4>, %ss<8>, %sf<4>, %smask<2>, %sscale, %sbits, %ssign;",
        ".reg .b16 %shalf<2>;",
        *words,
        "bfe.s32 %smask1, %slane, 1, 1;",  # all ones in lanes 2 and 3 of four
        "not.b32 %smask0, %smask1;",
        "mov.b32 %sscale, 0x74007400;",  # 2**14 in f16, twice
        *(f"mov.b32 %st{at}, 0;" for at in range(4)),
    ]
    for at in range(4):
        lines.append(f"and.b32 %se{at}, %se{at}, 0x7F7F7F7F;")
        lines += _halves("e4m3", f"%se{at}", f"%ss{2 * at}", f"%ss{2 * at + 1}")
    for half in (0, 1):
        lines += [*_e2m1_to_f16(a[2 * half], "%sa", 0), *_e2m1_to_f16(a[2 * half + 1], "%sa", 4)]
        lines += _e2m1_to_f16(b[half], "%sb", 0)
        for part in (0, 1):
            for at in range(4):
                lines += [f"and.b32 %sc{at}, %sb{at}, %smask{part};", f"mov.b32 %sp{at}, 0;"]
                # The scale of group 2 half + part.
                lines += [f"mov.b32 {{%shalf0, %shalf1}}, %ss{2 * at + half};", f"cvt.f32.f16 %sf{at}, %shalf{part};"]
            lines.append(f"{_F16} {_SUMS}, {{%sa0, %sa4, %sa1, %sa5}}, {{%sc0, %sc1}}, {_SUMS};")
            lines.append(f"{_F16} {_SUMS}, {{%sa2, %sa6, %sa3, %sa7}}, {{%sc2, %sc3}}, {_SUMS};")
            for at in range(4):
                lines.append(f"mul.rn.f32 %sp{at}, %sp{at}, %sf{at // 2};")
                lines.append(f"fma.rn.f32 %st{at}, %sp{at}, %sf{2 + at % 2}, %st{at};")
    return [*lines, *(f"add.rn.f32 {d[at]}, %st{at}, {c[at]};" for at in range(4))]


def _e2m1_to_f16(source: str, result: str, first: int) -> list[str]:
    """The eight E2M1 of a word as four pairs, ``i`` and ``i + 4``. The bits in place are the number times 2**-14."""
    lines = []
    for at in range(4):
        lines += [
            f"shr.u32 %sbits, {source}, {4 * at};",
            "and.b32 %ssign, %sbits, 0x00080008;",
            "shl.b32 %ssign, %ssign, 12;",
            "and.b32 %sbits, %sbits, 0x00070007;",
            "shl.b32 %sbits, %sbits, 9;",
            "or.b32 %sbits, %sbits, %ssign;",
            f"mul.rn.f16x2 {result}{first + at}, %sbits, %sscale;",
        ]
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


def _scale_words(instruction: PtxInstruction) -> tuple[list[str], tuple[int, int]]:
    """The words with the scales of rows ``g`` and ``g + 8``, and of columns ``2 t`` and ``2 t + 1``, in ``%se0`` to
    ``%se3``; and the ``byte_id`` of A's and of B's."""
    scale_a, picked_a, scale_b, picked_b = instruction.operands[4:]
    byte_a, thread_a = _picked(instruction, picked_a)
    byte_b, thread_b = _picked(instruction, picked_b)
    lines = [
        ".reg .b32 %slane, %sfrom, %se<4>;",
        "mov.u32 %slane, %laneid;",
        "and.b32 %sfrom, %slane, 28;",  # 4 g
        f"add.u32 %sfrom, %sfrom, {2 * thread_a};",
        f"shfl.sync.idx.b32 %se0, {scale_a}, %sfrom, 31, -1;",
        "add.u32 %sfrom, %sfrom, 1;",
        f"shfl.sync.idx.b32 %se1, {scale_a}, %sfrom, 31, -1;",
        "and.b32 %sfrom, %slane, 3;",
        "shl.b32 %sfrom, %sfrom, 3;",  # columns 2 t and 2 t + 1: lanes 8 t and 8 t + 4
        f"add.u32 %sfrom, %sfrom, {thread_b};",
        f"shfl.sync.idx.b32 %se2, {scale_b}, %sfrom, 31, -1;",
        "add.u32 %sfrom, %sfrom, 4;",
        f"shfl.sync.idx.b32 %se3, {scale_b}, %sfrom, 31, -1;",
    ]
    return lines, (byte_a, byte_b)


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
