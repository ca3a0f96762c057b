"""One instruction each, as our kernels for SM 8.0 and 9.0 have them: what the interpreter and a GPU must agree on.

Bit for bit, unless the PTX manual allows an error: ``.approx`` and ``.full`` have a bound there, and a matrix product
of f16 or bf16 sums in at least single precision, in any order and with any rounding. For FP8 the manual says nothing;
Hopper keeps 13 bits behind the point of the largest product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ptx_kernels import Words
from ptxproof.interpreter.numbers import Array


@dataclass(frozen=True)
class One:
    """An instruction with its inputs in ``%i0 ..`` and results in ``%o0 ..``."""

    body: str
    make: Callable[[], Words]
    """Its inputs, ``[32, inputs]``."""
    out: str = "b32"
    """What each word of the result holds: ``b32``, ``f32``, ``f16x2`` or ``bf16x2``. A NaN is like any other."""
    outputs: int = 1
    relative: float = 0.0
    absolute: float = 0.0
    sums: float = 0.0
    """For products of matrices: the error in parts of the largest result."""
    signed_zero: bool = True
    """Whether it matters which of two zeros the result is: of equals ``min`` and ``max`` may give either here."""
    since: int = 80
    """The first of SM 8.0, 8.9 and 9.0 that has it."""

    name: str | None = None
    """Where the last instruction of the body does not tell it."""

    def __str__(self) -> str:
        return self.name or self.body.strip().rstrip(";").rpartition("; ")[2].partition(" ")[0]


def integers() -> Words:
    """Random words, and among them ends and small numbers."""
    generator = np.random.default_rng(3)
    words = generator.integers(0, 2**32, (32, 4), dtype=np.uint64).astype(np.uint32)
    ends = np.array([0, 1, 2, 31, 32, 33, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x8000, 0x7FFF], np.uint32)
    words[:12] = generator.choice(ends, (12, 4))
    return words


def floats() -> Words:
    """Zeros, ends, subnormals, infinities and NaN, in combinations, and random numbers of many sizes."""
    chosen = np.array(
        [0.0, -0.0, 1.0, -1.5, 3.4e38, -1e-40, 1.2e-38, np.inf, -np.inf, np.nan, 448.0, 65520.0, 2.5, 3.5, -2.5, 1e-9],
        np.float32,
    )
    generator = np.random.default_rng(4)
    values = generator.choice(chosen, (32, 4))
    values[12:] = generator.normal(0, 1, (20, 4)) * 10.0 ** generator.integers(-3, 6, (20, 4))
    return values.astype(np.float32).view(np.uint32)


def positive() -> Words:
    """Normal numbers of all sizes."""
    generator = np.random.default_rng(5)
    return (2.0 ** generator.uniform(-60, 60, (32, 4))).astype(np.float32).view(np.uint32)


def moderate() -> Words:
    """Numbers within 2 pi of zero."""
    return np.random.default_rng(6).uniform(-6.2, 6.2, (32, 4)).astype(np.float32).view(np.uint32)


def pairs(kind: str) -> Callable[[], Words]:
    """Two f16 or bf16 in a word, specials among them."""

    def make() -> Words:
        with np.errstate(over="ignore"):
            values = floats().view(np.float32).reshape(32, 4)
            other = values[::-1].copy()
            both = np.stack([_narrow(values, kind), _narrow(other, kind)], -1)
            return np.ascontiguousarray(both).view(np.uint32).reshape(32, 4)

    return make


def _narrow(values: Array, kind: str) -> Array:
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def matrices(kind: str) -> Callable[[], Words]:
    """A and B of a product, and float32 to add: numbers of like sizes, and no NaN."""

    def make() -> Words:
        generator = np.random.default_rng(7)
        words = np.zeros((32, 10), np.uint32)
        if kind == "e4m3":
            words[:, :6] = generator.integers(0, 2**32, (32, 6), dtype=np.uint64).astype(np.uint32) & 0xB7B7B7B7
        else:
            halves = _narrow(generator.normal(0, 1, (32, 12)).astype(np.float32), kind).astype(np.uint32)
            words[:, :6] = halves[:, :6] | halves[:, 6:] << 16
        words[:, 6:] = generator.normal(0, 1, (32, 4)).astype(np.float32).view(np.uint32)
        return words

    return make


_ODD = "or.b32 %t0, %i1, 1; "  # no division by zero, whose result is nobody's business
_WIDE = "mov.b64 %d0, {%i0, %i1}; mov.b64 %d1, {%i2, %i3}; "
_SPLIT = "mov.b64 {%o0, %o1}, %d2;"
_HALF = "mov.b32 {%h0, %h1}, %i0; "
_ADDRESS = "shl.b32 %t0, %lane, 4; add.u32 %t1, %smem, %t0; "
_ROWS = "and.b32 %t2, %lane, 31; shl.b32 %t2, %t2, 4; add.u32 %t2, %smem, %t2; "
_OUT = "%o0, %o1, %o2, %o3"
_FILL = f"{_ADDRESS} st.shared.v4.b32 [%t1], {{%i0, %i1, %i2, %i3}}; bar.sync 0; {_ROWS}"

INTEGER = [
    *(One(f"{op} %o0, %i0, %i1;", integers) for op in (
        "add.s32", "sub.s32", "mul.lo.s32", "mul.hi.s32", "mul.hi.u32", "min.s32", "max.s32", "min.u32", "max.u32",
        "and.b32", "or.b32", "xor.b32",
    )),
    *(One(f"{_ODD}{op} %o0, %i0, %t0;", integers) for op in ("div.u32", "rem.u32")),
    *(One(f"and.b32 %t1, %i0, 2147483647; {_ODD}and.b32 %t0, %t0, 65535; {op} %o0, %t1, %t0;", integers)
      for op in ("div.s32", "rem.s32")),
    *(One(f"{op} %o0, %i0, %i1, %i2;", integers)
      for op in ("mad.lo.s32", "prmt.b32", "shf.l.wrap.b32", "shf.r.wrap.b32")),
    *(One(f"and.b32 %t0, %i1, 63; {op} %o0, %i0, %t0;", integers) for op in ("shl.b32", "shr.u32", "shr.s32")),
    *(One(f"and.b32 %t0, %i1, 31; and.b32 %t1, %i2, 31; {op} %o0, %i0, %t0, %t1;", integers)
      for op in ("bfe.u32", "bfe.s32")),
    *(One(f"{op} %o0, %i0;", integers) for op in ("not.b32", "popc.b32", "clz.b32", "bfind.u32", "neg.s32", "abs.s32")),
    *(One(f"lop3.b32 %o0, %i0, %i1, %i2, {table};", integers, name=f"lop3 {table}")
      for table in (0xE8, 0xCA, 0x78, 0x96)),
    *(One(f"{op} %d2, %i0, %i1; {_SPLIT}", integers, outputs=2, name=op) for op in ("mul.wide.u32", "mul.wide.s32")),
    *(One(f"{_WIDE}{op} %d2, %d0, %d1; {_SPLIT}", integers, outputs=2, name=op)
      for op in ("add.s64", "sub.s64", "mul.lo.s64", "min.s64", "max.u64", "and.b64")),
    One(f"{_WIDE}mad.wide.u32 %d2, %i0, %i1, %d1; {_SPLIT}", integers, outputs=2, name="mad.wide.u32"),
    *(One(f"{_WIDE}and.b32 %t0, %i2, 127; {op} %d2, %d0, %t0; {_SPLIT}", integers, outputs=2, name=op)
      for op in ("shl.b64", "shr.u64", "shr.s64")),
    One("add.cc.u32 %o0, %i0, %i1; addc.u32 %o1, %i2, %i3;", integers, outputs=2, name="add.cc, addc"),
    *(One(f"setp.{op} %p0, %i0, %i1; selp.b32 %o0, %i2, %i3, %p0;", integers, name=f"setp.{op}")
      for op in ("lt.s32", "ge.s32", "lt.u32", "eq.s32", "ne.b32", "hi.u32")),
    One("setp.lt.u32 %p0, %i0, %i1; setp.ge.and.s32 %p1, %i2, %i3, %p0; selp.b32 %o0, 1, 0, %p1;", integers,
        name="setp.and"),
    *(One(f"{_HALF}cvt.{op} %o0, %h0;", integers, name=f"cvt.{op}") for op in ("u32.u16", "s32.s16")),
    *(One(f"cvt.{op} %h0, %i0; mov.b32 %o0, {{%h0, %h0}};", integers, name=f"cvt.{op}") for op in ("u16.u32",)),
    *(One(f"cvt.{op} %d2, %i0; {_SPLIT}", integers, outputs=2, name=f"cvt.{op}") for op in ("u64.u32", "s64.s32")),
    # A register that is wider than the source type counts by its lowest bits.
    *(One(f"{_WIDE}cvt.{op} %d2, %d0; {_SPLIT}", integers, outputs=2, name=f"cvt.{op} of 64 bits")
      for op in ("u64.u32", "s64.s32", "s64.s8")),
    *(One(f"cvt.{op} %o0, %i0;", integers, name=f"cvt.{op} of 32 bits") for op in ("u32.u8", "s32.s8", "s32.s16")),
    *(One(f"cvt.{op} %o0, %i0;", integers, "f32", name=f"cvt.{op}") for op in ("rn.f32.s32", "rn.f32.u32")),
]  # fmt: skip
WARP = [
    *(One(f"shfl.sync.{mode}.b32 %o0|%p0, %i0, {by}, {bounds}, -1; selp.b32 %o1, 1, 0, %p0;", integers, outputs=2,
          name=f"shfl {mode} {by} {bounds}")
      for mode, by, bounds in (("bfly", 1, 31), ("bfly", 16, 31), ("idx", 5, 31), ("idx", 3, 7199), ("up", 3, 0),
                               ("down", 9, 31), ("down", 2, 6175))),
    One("setp.lt.u32 %p0, %i0, %i1; vote.sync.ballot.b32 %o0, %p0, -1;", integers),
    One("setp.lt.u32 %p0, %i0, %i1; vote.sync.any.pred %p1, %p0, -1; selp.b32 %o0, 1, 0, %p1;", integers,
        name="vote.any"),
    *(One(f"or.b32 %t0, %i0, 1; redux.sync.{op} %o0, %t0, -1;", integers)
      for op in ("add.u32", "max.s32", "min.u32", "or.b32", "and.b32")),
]  # fmt: skip
MEMORY = [
    One(f"{_FILL} ld.shared.v4.b32 {{%o0, %o1, %o2, %o3}}, [%t2];", integers, outputs=4, name="st.shared, ld.shared"),
    *(One(f"{_FILL} ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{_OUT[: 5 * count - 2]}}}, [%t2];",
          integers, outputs=count, name=f"ldmatrix x{count}{trans}")
      for count in (1, 2, 4) for trans in ("", ".trans")),
    *(One(f"{_ROWS} stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%t2], {{%i0, %i1, %i2, %i3}}; bar.sync 0; "
          "ld.shared.v4.b32 {%o0, %o1, %o2, %o3}, [%t2];", integers, outputs=4, since=90, name=f"stmatrix{trans}")
      for trans in ("", ".trans")),
    One(f"{_ADDRESS} cp.async.cg.shared.global [%t1], [%in], 16; cp.async.commit_group; cp.async.wait_group 0; "
        "bar.sync 0; ld.shared.v4.b32 {%o0, %o1, %o2, %o3}, [%t1];", integers, outputs=4, name="cp.async"),
    One(f"{_ADDRESS} st.shared.b32 [%t1], %i0; bar.sync 0; atom.shared.add.u32 %o0, [%t1], %i1; bar.sync 0; "
        "ld.shared.b32 %o1, [%t1];", integers, outputs=2, name="atom.shared.add"),
]  # fmt: skip
FLOAT = [
    *(One(f"{op} %o0, %i0, %i1;", floats, "f32") for op in (
        "add.rn.f32", "sub.rn.f32", "mul.rn.f32", "add.rn.ftz.f32", "mul.rn.ftz.f32", "div.rn.f32",
    )),
    *(One(f"{op} %o0, %i0, %i1;", floats, "f32", signed_zero=False)
      for op in ("min.f32", "max.f32", "min.NaN.f32", "max.NaN.f32")),
    *(One(f"{op} %o0, %i0, %i1, %i2;", floats, "f32") for op in ("fma.rn.f32", "fma.rn.ftz.f32")),
    *(One(f"{op} %o0, %i0;", floats, "f32") for op in ("abs.f32", "neg.f32", "sqrt.rn.f32", "rcp.rn.f32")),
    *(One(f"setp.{op} %p0, %i0, %i1; selp.b32 %o0, 1, 0, %p0;", floats, name=f"setp.{op}")
      for op in ("eq.f32", "lt.f32", "geu.f32", "neu.f32", "nan.f32", "gtu.f32")),
    *(One(f"cvt.{op} %o0, %i0;", floats, name=f"cvt.{op}")
      for op in ("rzi.s32.f32", "rni.s32.f32", "rmi.s32.f32", "rpi.s32.f32", "rzi.u32.f32")),
    *(One(f"cvt.{op} %o0, %i0;", floats, "f32", name=f"cvt.{op}") for op in ("rmi.f32.f32", "rni.f32.f32")),
    One("cvt.rn.bf16x2.f32 %o0, %i0, %i1;", floats, "bf16x2"),
    One("cvt.rz.bf16x2.f32 %o0, %i0, %i1;", floats, "bf16x2"),
    One("cvt.rz.bf16.f32 %h0, %i0; mov.b32 %o0, {%h0, %h0};", floats, "bf16x2"),
    One("cvt.rn.f16x2.f32 %o0, %i0, %i1;", floats, "f16x2"),
    One("cvt.rn.f16.f32 %h0, %i0; mov.b32 %o0, {%h0, %h0};", floats, "f16x2", name="cvt.rn.f16.f32"),
    One(f"{_HALF}cvt.f32.f16 %o0, %h0;", pairs("f16"), "f32", name="cvt.f32.f16"),
    One("cvt.rn.satfinite.e4m3x2.f32 %h0, %i0, %i1; cvt.u32.u16 %o0, %h0;", floats, since=89,
        name="cvt.rn.satfinite.e4m3x2.f32"),
    One(f"{_HALF}cvt.rn.f16x2.e4m3x2 %o0, %h0;", integers, "f16x2", since=89, name="cvt.rn.f16x2.e4m3x2"),
    *(One(f"{op}.f16x2 %o0, %i0, %i1;", pairs("f16"), "f16x2") for op in ("add.rn", "mul.rn", "sub.rn")),
    One("fma.rn.f16x2 %o0, %i0, %i1, %i2;", pairs("f16"), "f16x2"),
    One("fma.rn.bf16x2 %o0, %i0, %i1, %i2;", pairs("bf16"), "bf16x2"),
    One("mul.rn.bf16x2 %o0, %i0, %i1;", pairs("bf16"), "bf16x2", since=90),
]  # fmt: skip
APPROXIMATE = [
    One("ex2.approx.f32 %o0, %i0;", moderate, "f32", relative=2.0**-22),
    One("ex2.approx.ftz.f32 %o0, %i0;", moderate, "f32", relative=2.0**-22),
    One("lg2.approx.f32 %o0, %i0;", positive, "f32", relative=2.0**-22, absolute=2.0**-22),
    One("rcp.approx.ftz.f32 %o0, %i0;", positive, "f32", relative=2.0**-23),
    One("rsqrt.approx.f32 %o0, %i0;", positive, "f32", relative=2.0**-22.9),
    One("sqrt.approx.ftz.f32 %o0, %i0;", positive, "f32", relative=2.0**-23),
    One("sin.approx.f32 %o0, %i0;", moderate, "f32", absolute=2.0**-20.5),
    One("cos.approx.f32 %o0, %i0;", moderate, "f32", absolute=2.0**-20.5),
    One("tanh.approx.f32 %o0, %i0;", moderate, "f32", relative=2.0**-11),
    One("div.full.f32 %o0, %i0, %i1;", positive, "f32", relative=2.0**-22),  # 2 ulp
]
_PRODUCT = "{%o0, %o1, %o2, %o3}, {%i0, %i1, %i2, %i3}, {%i4, %i5}, {%i6, %i7, %i8, %i9};"
MATRIX = [
    *(One(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {_PRODUCT}", matrices(kind), "f32", 4,
          sums=17 * 2.0**-23, name=f"mma {kind}") for kind in ("f16", "bf16")),
    One(f"mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {_PRODUCT}", matrices("e4m3"), "f32", 4,
        sums=33 * 2.0**-13, since=89, name="mma e4m3"),
]  # fmt: skip
ALL = [*INTEGER, *WARP, *MEMORY, *FLOAT, *APPROXIMATE, *MATRIX]


def numbers_of(words: Words, kind: str) -> Array:
    """Words as the floats that they hold, in float64."""
    with np.errstate(invalid="ignore"):  # a NaN that signals
        return _numbers_of(words, kind)


def _numbers_of(words: Words, kind: str) -> Array:
    if kind == "f32":
        return np.ascontiguousarray(words).view(np.float32).astype(np.float64)
    halves = np.ascontiguousarray(words).view(np.uint16)
    if kind == "f16x2":
        return halves.view(np.float16).astype(np.float64)
    return (halves.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def agree(one: One, ours: Words, theirs: Words) -> bool:
    """Whether two executions of an instruction are the same, as far as its result is said to be."""
    if one.out == "b32":
        return bool((ours == theirs).all())
    a, b = numbers_of(ours, one.out), numbers_of(theirs, one.out)
    both_nan = np.isnan(a) & np.isnan(b)
    if not (one.relative or one.absolute or one.sums):
        same_sign = (np.signbit(a) == np.signbit(b)) | (not one.signed_zero)
        return bool(((a == b) & same_sign | both_nan).all())
    # The interpreter's own result is rounded to float32 too.
    room = (one.relative + 2.0**-24) * np.abs(b) + one.absolute + one.sums * np.abs(b).max()
    return bool(((np.abs(a - b) <= room) | both_nan | (a == b)).all())
