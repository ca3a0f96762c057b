"""Instructions that a GPU lacks, spelled out in those that every SM from 8.0 on has: elementwise ones and ``stmatrix``.

Each function takes an instruction and gives the lines that stand for it, registers first. It sets no predicate of its
own, so that the translation can put the instruction's own before every line. What a line uses and a GPU lacks is
spelled out in turn. The sums are those of the instruction, rounding included; where a function relies on that, it says
why.
"""

from __future__ import annotations

from collections.abc import Callable

from ptxproof.errors import BadPtx
from ptxproof.ptx import PtxInstruction, vector

Spelling = Callable[[PtxInstruction], list[str]]


def packed_float32(instruction: PtxInstruction) -> list[str]:
    """``add.rn.f32x2 d, a, b``: both halves by themselves."""
    result, *sources = instruction.operands
    single = instruction.opcode.removesuffix("x2")
    lines = [f".reg .b32 %sx<{2 * len(sources)}>;"]
    for at, source in enumerate(sources):
        lines.append(f"mov.b64 {{%sx{2 * at}, %sx{2 * at + 1}}}, {source};")
    for half in (0, 1):
        names = ", ".join(f"%sx{2 * at + half}" for at in range(len(sources)))
        lines.append(f"{single} %sx{half}, {names};")
    return [*lines, f"mov.b64 {result}, {{%sx0, %sx1}};"]


def mixed_sum(instruction: PtxInstruction) -> list[str]:
    """``add.rn.f32.bf16 d, a, c``, ``fma.rn.f32.f16 d, a, b, c``: all but the last are narrow, which float32 holds."""
    result, *narrow, last = instruction.operands
    opcode, _, kind = instruction.opcode.rpartition(".")
    lines = [f".reg .b32 %sx<{len(narrow)}>;"]
    if kind == "f16":
        lines += [f"cvt.f32.f16 %sx{at}, {source};" for at, source in enumerate(narrow)]
    else:
        lines += [".reg .b16 %szero;", "mov.b16 %szero, 0;"]
        lines += [f"mov.b32 %sx{at}, {{%szero, {source}}};" for at, source in enumerate(narrow)]
    names = ", ".join(f"%sx{at}" for at in range(len(narrow)))
    return [*lines, f"{opcode} {result}, {names}, {last};"]


def of_three(instruction: PtxInstruction) -> list[str]:
    """``max.f32 d, a, b, c``: a NaN is passed over, or with ``.NaN`` kept, by the two of them as by the one."""
    result, *sources = instruction.operands
    two = instruction.opcode.replace(".abs", "")
    lines = [".reg .b32 %sx<3>;", *(f"mov.b32 %sx{at}, {source};" for at, source in enumerate(sources))]
    if ".abs" in instruction.opcode:
        lines += [f"abs.f32 %sx{at}, %sx{at};" for at in range(3)]
    return [*lines, f"{two} %sx0, %sx0, %sx1;", f"{two} {result}, %sx0, %sx2;"]


def bf16_arithmetic(instruction: PtxInstruction) -> list[str]:
    """As ``fma``, which rounds once as well: ``a * 1 + b``, ``b * -1 + a``, ``a * b + -0``."""
    result, a, b = instruction.operands
    op = instruction.opcode.partition(".")[0]
    pair = instruction.opcode.endswith("x2")
    kind, name = (".b32", "fma.rn.bf16x2") if pair else (".b16", "fma.rn.bf16")
    constant = {"add": 0x3F80, "sub": 0xBF80, "mul": 0x8000}[op]
    given = constant * 0x10001 if pair else constant
    order = {"add": f"{a}, %sone, {b}", "sub": f"{b}, %sone, {a}", "mul": f"{a}, {b}, %sone"}[op]
    return [f".reg {kind} %sone;", f"mov{kind} %sone, {given:#x};", f"{name} {result}, {order};"]


def bf16_comparison(instruction: PtxInstruction) -> list[str]:
    """In float32, which holds every bf16."""
    result, a, b, *rest = instruction.operands
    lines = [".reg .b32 %sx<2>;", ".reg .b16 %szero, %sv<2>;", "mov.b16 %szero, 0;"]
    for at, source in enumerate((a, b)):
        lines += [f"mov.b16 %sv{at}, {source};", f"mov.b32 %sx{at}, {{%szero, %sv{at}}};"]
    operands = ", ".join([result, "%sx0", "%sx1", *rest])
    return [*lines, f"{instruction.opcode.removesuffix('.bf16')}.f32 {operands};"]


def packed_integers(instruction: PtxInstruction) -> list[str]:
    """``add.s16x2 d, a, b``: both halves by themselves."""
    result, a, b = instruction.operands
    if ".relu" in instruction.opcode:
        raise BadPtx(f"{instruction.opcode} is not spelled out: no kernel uses it.")
    single = instruction.opcode.removesuffix("x2")
    return [
        ".reg .b16 %sx<4>;",
        f"mov.b32 {{%sx0, %sx1}}, {a};",
        f"mov.b32 {{%sx2, %sx3}}, {b};",
        f"{single} %sx0, %sx0, %sx2;",
        f"{single} %sx1, %sx1, %sx3;",
        f"mov.b32 {result}, {{%sx0, %sx1}};",
    ]


def stmatrix(instruction: PtxInstruction) -> list[str]:
    """Lane ``8 k + r`` has the address of row ``r`` of matrix ``k``; lane ``l`` holds columns ``2 (l % 4)`` and the
    next of row ``l / 4``, or with ``.trans`` rows ``2 (l % 4)`` and the next of column ``l / 4``."""
    address, sources = instruction.operands[0], vector(instruction.operands[1])
    base, _, offset = address.strip("[]").replace(" ", "").partition("+")
    lines = [
        ".reg .b32 %slane, %srow, %squad, %sfrom, %sat, %sbase;",
        f"add.u32 %sbase, {base}, {offset or 0};",
        "mov.u32 %slane, %laneid;",
        "shr.u32 %srow, %slane, 2;",
        "and.b32 %squad, %slane, 3;",
    ]
    if ".trans" not in instruction.opcode:
        lines.append("shl.b32 %squad, %squad, 2;")
        for at, source in enumerate(sources):
            lines += [
                f"add.u32 %sfrom, %srow, {8 * at};",
                "shfl.sync.idx.b32 %sat, %sbase, %sfrom, 31, -1;",
                "add.u32 %sat, %sat, %squad;",
                f"st.shared.b32 [%sat], {source};",
            ]
        return lines
    lines[0] = lines[0].replace(";", "; .reg .b16 %shalf<2>;")
    lines += ["shl.b32 %srow, %srow, 1;", "shl.b32 %squad, %squad, 1;"]
    for at, source in enumerate(sources):
        lines.append(f"mov.b32 {{%shalf0, %shalf1}}, {source};")
        for half in (0, 1):
            lines += [
                f"add.u32 %sfrom, %squad, {8 * at + half};",
                "shfl.sync.idx.b32 %sat, %sbase, %sfrom, 31, -1;",
                "add.u32 %sat, %sat, %srow;",
                f"st.shared.b16 [%sat], %shalf{half};",
            ]
    return lines


def nothing(instruction: PtxInstruction) -> list[str]:
    """``griddepcontrol``: without a dependent launch the kernel before has ended, and the next waits by itself."""
    return []


def fp8_to_f16(instruction: PtxInstruction) -> list[str]:
    """``cvt.rn.f16x2.e4m3x2 d, a``. E5M2 is the upper byte of an f16. E4M3 has its mantissa one bit lower and a bias
    of 7 and not of 15: the bits in place are the number times 2**-8, exactly, subnormal ones too. 0x7F is NaN."""
    result, source = instruction.operands
    if ".relu" in instruction.opcode:
        raise BadPtx(f"{instruction.opcode} is not spelled out: no kernel uses it.")
    lines = [".reg .b32 %sw, %sm, %ss, %se;", ".reg .b16 %slo;", f"mov.b16 %slo, {source};", "cvt.u32.u16 %sw, %slo;"]
    lines.append("prmt.b32 %sw, %sw, 0, 0x1404;")  # the bytes to the upper halves of both 16 bits
    if "e5m2" in instruction.opcode:
        return [*lines, f"mov.b32 {result}, %sw;"]
    return [
        lines[0].replace(";", "; .reg .pred %snan<2>; .reg .b16 %sn<2>;"),
        *lines[1:],
        "and.b32 %ss, %sw, 0x80008000;",
        "and.b32 %sm, %sw, 0x7F007F00;",
        "shr.u32 %se, %sm, 1;",
        "mov.b32 %sw, 0x5C005C00;",  # 2**8 in f16, twice
        "mul.rn.f16x2 %se, %se, %sw;",
        "or.b32 %se, %se, %ss;",
        "mov.b32 {%sn0, %sn1}, %sm;",
        "setp.eq.u16 %snan0, %sn0, 0x7F00;",
        "setp.eq.u16 %snan1, %sn1, 0x7F00;",
        "mov.b32 {%sn0, %sn1}, %se;",
        "selp.b16 %sn0, 0x7FFF, %sn0, %snan0;",
        "selp.b16 %sn1, 0x7FFF, %sn1, %snan1;",
        f"mov.b32 {result}, {{%sn0, %sn1}};",
    ]


def float32_to_e4m3(instruction: PtxInstruction) -> list[str]:
    """``cvt.rn.satfinite.e4m3x2.f32 d, a, b``: ``a`` in the upper byte. To the nearest of the two neighbours, ties to
    even, at most 448; below 2**-6 in steps of 2**-9. A NaN is 0x7F."""
    result, a, b = instruction.operands
    if instruction.opcode != "cvt.rn.satfinite.e4m3x2.f32":
        raise BadPtx(f"{instruction.opcode} is not spelled out: no kernel uses it.")
    lines = [".reg .b32 %sx, %sm, %su, %st, %sc<2>;", ".reg .pred %sp;"]
    for at, source in enumerate((b, a)):
        lines += [
            f"mov.b32 %sx, {source};",
            "and.b32 %sm, %sx, 0x7FFFFFFF;",
            "bfe.u32 %st, %sm, 20, 1;",
            "add.u32 %su, %sm, 0x7FFFF;",
            "add.u32 %su, %su, %st;",
            "shr.u32 %su, %su, 20;",
            "sub.u32 %su, %su, 960;",  # (127 - 7) << 3: from float32's bias to E4M3's
            "min.s32 %su, %su, 126;",
            "mul.rn.f32 %st, %sm, 0f44000000;",  # 2**9
            "cvt.rni.s32.f32 %st, %st;",
            "setp.lt.u32 %sp, %sm, 0x3C800000;",  # 2**-6
            "selp.b32 %su, %st, %su, %sp;",
            "setp.gt.u32 %sp, %sm, 0x7F800000;",
            "selp.b32 %su, 127, %su, %sp;",
            "selp.b32 %sx, 0, %sx, %sp;",  # the NaN has no sign
            "shr.u32 %sx, %sx, 24;",
            "and.b32 %sx, %sx, 128;",
            f"or.b32 %sc{at}, %su, %sx;",
        ]
    return [
        *lines,
        "shl.b32 %sc1, %sc1, 8;",
        "or.b32 %sc0, %sc0, %sc1;",
        f"cvt.u16.u32 {result}, %sc0;",
    ]
