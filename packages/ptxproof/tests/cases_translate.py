"""Each instruction that is spelled out, against arithmetic in Python: as itself, and as every SM that lacks it has it.

``test_translate.py`` runs them in the interpreter, whose own reading of an instruction is thereby tested too, and
``tests/gpu/test_translate.py`` on a GPU. Where a lane's numbers are in a matrix is written here a third time, from the
PTX manual.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Protocol

import numpy as np
import pytest

from ptx_kernels import Words, scaled_mma, warp_kernel
from ptxproof.instructions import NVFP4_MMA, form_of
from ptxproof.interpreter.numbers import Array, code_values
from ptxproof.ptx import instructions
from ptxproof.translation import translate

SMS = (80, 86, 89, 90)
LANES = np.arange(32)


def random_words(count: int, seed: int = 0) -> Words:
    return np.random.default_rng(seed).integers(0, 2**32, (32, count), dtype=np.uint64).astype(np.uint32)


class Ways(Protocol):
    """How a kernel of one warp is executed."""

    sum_error: float
    """What a matrix product of 32 and an addend may be off by, in parts of the sum of its terms' sizes."""

    def both(self, body: str, words: Words, num_out: int, sm: int) -> list[Words]:
        """What the instructions give translated for ``sm`` and, where they can be executed, as they are."""


def translated_for(sm: int, body: str, num_in: int, num_out: int) -> tuple[str, str]:
    """The kernel as it is and for ``sm``, which has every instruction that is left."""
    ptx = warp_kernel(body, num_in, num_out)
    translated = translate(ptx, sm)
    assert translated.spelled
    for found in instructions(translated.ptx):
        form = form_of(found.instruction.opcode, len(found.instruction.operands))
        assert form is None or sm in form.sms, found.instruction
    return ptx, translated.ptx


def floats(words: Array) -> Array:
    return np.ascontiguousarray(words).view(np.float32)


def special_floats(count: int) -> Words:
    """Zeros, ends, subnormals, infinities and NaN, in every combination of a few, and random numbers."""
    chosen = [0.0, -0.0, 1.0, -1.5, 3.4e38, -1e-40, 1.2e-38, np.inf, -np.inf, np.nan, 448.0, 464.0, 2.0**-9, 2.0**-10]
    generator = np.random.default_rng(1)
    values = generator.choice(np.array(chosen, np.float32), (32, count))
    values[16:] = generator.normal(0, 100, (16, count)).astype(np.float32)
    return values.view(np.uint32)


def same(got: Words, wanted: Array) -> bool:
    """The same float32, NaN like NaN."""
    ours, theirs = floats(got), wanted.astype(np.float32)
    return bool(((ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))).all())


def exact_fma(a: float, b: float, c: float) -> np.float32:
    """Rounded once, by whole numbers."""
    if not all(map(np.isfinite, (a, b, c))):
        return np.float32(np.float64(a) * b + c)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return np.float32(np.float64(a) * b + c)
    near = np.float32(float(exact))  # rounded twice: correct it by its neighbours
    best = near
    for other in (near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))):
        if np.isfinite(other) and np.isfinite(best):
            gap, least = abs(Fraction(float(other)) - exact), abs(Fraction(float(best)) - exact)
            if gap < least or (gap == least and int(np.float32(other).view(np.uint32)) % 2 == 0):
                best = other
    return best


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("name", ["add.rn", "sub", "mul.rn", "fma.rn"])
def test_pairs_of_float32(name: str, sm: int, ways: Ways) -> None:
    sources = 3 if name.startswith("fma") else 2
    words = special_floats(2 * sources)
    packs = " ".join(f"mov.b64 %d{at}, {{%i{2 * at}, %i{2 * at + 1}}};" for at in range(sources))
    operands = ", ".join(f"%d{at}" for at in range(sources))
    body = f"{packs} {name}.f32x2 %d7, {operands}; mov.b64 {{%o0, %o1}}, %d7;"
    values = floats(words).reshape(32, sources, 2)
    with np.errstate(all="ignore"):
        simple: dict[str, Callable[..., Array]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
        if sources == 3:
            wanted = np.array([[exact_fma(*map(float, values[lane, :, half])) for half in (0, 1)] for lane in LANES])
        else:
            wanted = simple[name[:3]](values[:, 0], values[:, 1])
    for got in ways.both(body, words, 2, sm):
        assert same(got, wanted)


@pytest.mark.parametrize("sm", SMS)
def test_a_predicate_holds_for_all_that_is_spelled_out(sm: int, ways: Ways) -> None:
    words = special_floats(3)
    body = (
        "and.b32 %t0, %lane, 1; setp.eq.u32 %p0, %t0, 1; mov.b32 %o0, %i2; "
        "@%p0 max.f32 %o0, %i0, %i1, %i2; mov.b32 %t1, %o0; mov.b32 %o0, %t1;"
    )
    values = floats(words)
    three = np.fmax(np.fmax(values[:, 0], values[:, 1]), values[:, 2])
    wanted = np.where(LANES % 2 == 1, three, values[:, 2])
    for got in ways.both(body, words, 1, sm):
        assert same(got[:, 0], wanted)


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("name", ["max.f32", "min.f32", "max.NaN.f32", "min.NaN.f32"])
def test_extremes_of_three(name: str, sm: int, ways: Ways) -> None:
    words = special_floats(3)
    values = floats(words)
    functions = {"max.f32": np.fmax, "min.f32": np.fmin, "max.NaN.f32": np.maximum, "min.NaN.f32": np.minimum}
    two = functions[name]
    with np.errstate(all="ignore"):
        wanted = two(two(values[:, 0], values[:, 1]), values[:, 2])
    for got in ways.both(f"{name} %o0, %i0, %i1, %i2;", words, 1, sm):
        zero = wanted == 0  # which of two zeros is left is nobody's business
        assert same(np.where(zero, np.uint32(0), got[:, 0]), np.where(zero, 0.0, wanted))


def bf16_words(count: int) -> tuple[Words, Array]:
    """Words whose lower halves are bf16, and the numbers."""
    words = special_floats(count) >> np.uint32(16)
    return words, floats(words << np.uint32(16))


@pytest.mark.parametrize("sm", SMS)
def test_bf16_in_float32_sums(sm: int, ways: Ways) -> None:
    narrow, values = bf16_words(2)
    wide = special_floats(1)[::-1].copy()
    words = np.concatenate([narrow, wide], 1)
    body = (
        "mov.b32 {%h0, %h2}, %i0; mov.b32 {%h1, %h2}, %i1; add.rn.f32.bf16 %o0, %h0, %i2; "
        "sub.rn.f32.bf16 %o1, %h0, %i2; fma.rn.f32.bf16 %o2, %h0, %h1, %i2;"
    )
    last = floats(wide)[:, 0]
    with np.errstate(all="ignore"):
        fused = np.array([exact_fma(*map(float, (values[at, 0], values[at, 1], last[at]))) for at in LANES])
        wanted = np.stack([values[:, 0] + last, values[:, 0] - last, fused], 1)
    for got in ways.both(body, words, 3, sm):
        assert same(got, wanted)


@pytest.mark.parametrize("sm", SMS)
def test_f16_in_float32_sums(sm: int, ways: Ways) -> None:
    """Also where a subnormal of the one is an ordinary number of the other."""
    wide = special_floats(1)[::-1].copy()
    words = np.concatenate([special_floats(2) >> 16, wide], 1)
    values = (words[:, :2].astype(np.uint16)).view(np.float16).astype(np.float32)
    body = (
        "mov.b32 {%h0, %h2}, %i0; mov.b32 {%h1, %h2}, %i1; add.rn.f32.f16 %o0, %h0, %i2; "
        "sub.rn.f32.f16 %o1, %h0, %i2; fma.rn.f32.f16 %o2, %h0, %h1, %i2;"
    )
    last = floats(wide)[:, 0]
    with np.errstate(all="ignore"):
        fused = np.array([exact_fma(*map(float, (values[at, 0], values[at, 1], last[at]))) for at in LANES])
        wanted = np.stack([values[:, 0] + last, values[:, 0] - last, fused], 1)
    for got in ways.both(body, words, 3, sm):
        assert same(got, wanted)


def to_bf16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return np.where(np.isnan(values), np.float32(np.nan), rounded.astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("sm", [80, 86, 89])
def test_sums_and_products_of_bf16(sm: int, ways: Ways) -> None:
    """Of numbers whose sum float32 holds exactly or nearly so."""
    generator = np.random.default_rng(3)
    numbers = to_bf16(generator.normal(0, 1, (32, 4)).astype(np.float32))
    numbers[0] = [0.0, -0.0, np.inf, np.nan]
    halves = (numbers.view(np.uint32) >> 16).astype(np.uint32)
    words = np.stack([halves[:, 0] | halves[:, 1] << 16, halves[:, 2] | halves[:, 3] << 16], 1)
    body = "add.rn.bf16x2 %o0, %i0, %i1; sub.bf16x2 %o1, %i0, %i1; mul.bf16x2 %o2, %i0, %i1;"
    a, b = numbers[:, :2].astype(np.float64), numbers[:, 2:].astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = [to_bf16((f(a, b)).astype(np.float32)) for f in (np.add, np.subtract, np.multiply)]
    for got in ways.both(body, words, 3, sm):
        for at, want in enumerate(wanted):
            low, high = got[:, at] << np.uint32(16), got[:, at] & np.uint32(0xFFFF0000)
            assert same(np.stack([low, high], 1), want)


@pytest.mark.parametrize("sm", [80, 86, 89])
def test_comparisons_and_packed_integers(sm: int, ways: Ways) -> None:
    words, values = bf16_words(2)
    body = (
        "mov.b32 {%h0, %h2}, %i0; mov.b32 {%h1, %h2}, %i1; setp.eq.bf16 %p0, %h0, %h1; selp.b32 %o0, 1, 0, %p0; "
        "setp.ltu.bf16 %p1, %h0, %h1; selp.b32 %o1, 1, 0, %p1; add.s16x2 %o2, %i2, %i3;"
    )
    integers = random_words(2)
    a, b = values[:, 0], values[:, 1]
    equal, below = a == b, ~(a >= b)
    low = (integers[:, 0] + integers[:, 1]) & 0xFFFF
    high = ((integers[:, 0] >> 16) + (integers[:, 1] >> 16)) & 0xFFFF
    for got in ways.both(body, np.concatenate([words, integers], 1), 3, sm):
        assert (got == np.stack([equal, below, low | high << 16], 1).astype(np.uint32)).all()


@pytest.mark.parametrize("sm", [80, 86, 89])
@pytest.mark.parametrize(("count", "trans"), [(1, False), (2, False), (4, False), (2, True), (4, True)])
def test_stmatrix(count: int, trans: bool, sm: int, ways: Ways) -> None:
    """Row ``r`` of matrix ``k`` goes where lane ``8 k + r`` says; lane ``l`` has two columns of row ``l / 4``."""
    words = random_words(count, seed=count)
    sources = ", ".join(f"%i{at}" for at in range(count))
    places = np.random.default_rng(9).permutation(8 * count)  # each row's own 16 bytes, in no order
    table = "mov.b32 %t0, 0;" + " ".join(
        f"setp.eq.u32 %p0, %lane, {lane}; selp.b32 %t0, {16 * place}, %t0, %p0;" for lane, place in enumerate(places)
    )
    kind = f"x{count}{'.trans' if trans else ''}"
    reads = " ".join(f"ld.shared.b32 %o{at}, [%t2 + {128 * at}];" for at in range(count))
    body = (
        f"{table} add.u32 %t0, %t0, %smem; stmatrix.sync.aligned.m8n8.{kind}.shared.b16 [%t0], {{{sources}}}; "
        f"bar.sync 0; shl.b32 %t1, %lane, 2; add.u32 %t2, %smem, %t1; {reads}"
    )
    halves = words.view(np.uint16).reshape(8, 4, count, 2)  # row or column, pair, matrix, which of the pair
    matrices = halves.transpose(2, 0, 1, 3).reshape(count, 8, 8)
    if trans:
        matrices = matrices.swapaxes(1, 2)
    memory = np.zeros((8 * count, 8), np.uint16)
    memory[places] = matrices.reshape(-1, 8)
    wanted = memory.reshape(-1).view(np.uint32).reshape(count, 32).T
    for got in ways.both(body, words, count, sm):
        assert (got == wanted).all()


@pytest.mark.parametrize("sm", [80, 86])
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_fp8_byte_becomes_its_f16(kind: str, sm: int, ways: Ways) -> None:
    words = np.arange(256, dtype=np.uint32).reshape(32, 8)
    words = words | words[::-1] << np.uint32(8)
    body = " ".join(f"cvt.u16.u32 %h0, %i{at}; cvt.rn.f16x2.{kind}x2 %o{at}, %h0;" for at in range(8))
    wanted = code_values(kind)[np.ascontiguousarray(words).view(np.uint8).reshape(32, 8, 4)[..., :2]]
    for got in ways.both(body, words, 8, sm):
        ours = np.ascontiguousarray(got).view(np.float16).reshape(32, 8, 2).astype(np.float64)
        assert ((ours == wanted) & (np.signbit(ours) == np.signbit(wanted)) | (np.isnan(ours) & np.isnan(wanted))).all()


@pytest.mark.parametrize("sm", [80, 86])
def test_float32_to_e4m3(sm: int, ways: Ways) -> None:
    """Every E4M3, what lies between two of them, a little to both sides of it, and what is out of range."""
    points = code_values("e4m3")[:127]
    middles = (points[1:] + points[:-1]) / 2
    values = np.concatenate(
        [points, middles, middles * (1 + 1e-6), middles * (1 - 1e-6), [449.0, 1e9, np.inf, np.nan, 1e-9]]
    )
    values = np.concatenate([values, -values]).astype(np.float32)
    values = np.resize(values, (32, -(-len(values) // 32)))
    body = " ".join(
        f"cvt.rn.satfinite.e4m3x2.f32 %h0, %i{at}, %i{at}; cvt.u32.u16 %o{at}, %h0;" for at in range(values.shape[1])
    )

    def nearest(value: float) -> int:
        if np.isnan(value):
            return 0x7F
        gaps = [abs(Fraction(float(point)) - Fraction(min(abs(float(value)), 448.0))) for point in points]
        least = min(gaps)
        code = min((at for at, gap in enumerate(gaps) if gap == least), key=lambda at: at % 2)
        return code | (128 if np.signbit(value) else 0)

    codes = np.array([[nearest(value) for value in row] for row in values])
    for got in ways.both(body, values.view(np.uint32), values.shape[1], sm):
        assert (got == codes * 0x101).all()


def matrices_of(a: Words, b: Words, kind: str = "e4m3") -> tuple[Array, Array]:
    """A ``[16, 32]`` and B ``[32, 8]`` of E4M3, or with 64 columns of E2M1, element by element as the manual places
    them: ``a[lane, register]``."""
    values = code_values(kind)
    each = 8 if kind == "e2m1" else 4  # numbers of a word
    bits = 32 // each
    left, right = np.zeros((16, 8 * each)), np.zeros((8 * each, 8))
    for lane in range(32):
        group, place = lane // 4, lane % 4
        for at in range(each):
            for register in range(4):
                row = group + (8 if register % 2 else 0)
                column = place * each + at + (4 * each if register >= 2 else 0)
                left[row, column] = values[int(a[lane, register]) >> bits * at & (1 << bits) - 1]
            for register in range(2):
                code = int(b[lane, register]) >> bits * at & (1 << bits) - 1
                right[place * each + at + 4 * each * register, group] = values[code]
    return left, right


def spread_of(result: Array) -> Array:
    """``[16, 8]`` as the lanes hold it, ``[32, 4]``."""
    return np.array(
        [[result[lane // 4 + 8 * (at // 2), lane % 4 * 2 + at % 2] for at in range(4)] for lane in range(32)]
    )


BLOCK_SCALED = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"


def scaled_case(seed: int, byte_a: int, thread_a: int, byte_b: int, thread_b: int) -> tuple[str, Words, Array, Array]:
    generator = np.random.default_rng(seed)
    words = random_words(12, seed)
    words[:, :6] &= np.uint32(0xBFBFBFBF)  # no NaN among the codes
    words[:, 6:10] = generator.normal(0, 1, (32, 4)).astype(np.float32).view(np.uint32)
    words[:, 10:] = generator.integers(110, 140, (32, 2, 4)).astype(np.uint8).reshape(32, 8).view(np.uint32)
    body = scaled_mma(BLOCK_SCALED, byte_a, thread_a, byte_b, thread_b)
    a_bytes = words[:, 10].copy().view(np.uint8).reshape(32, 4)[:, byte_a]
    b_bytes = words[:, 11].copy().view(np.uint8).reshape(32, 4)[:, byte_b]
    rows = np.array([a_bytes[4 * (row % 8) + 2 * thread_a + row // 8] for row in range(16)], np.float64)
    columns = np.array([b_bytes[4 * column + thread_b] for column in range(8)], np.float64)
    return body, words, rows, columns


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize(
    "picked", [(0, 0, 0, 0), (1, 1, 2, 3), (3, 0, 1, 2), (2, 1, 3, 1)], ids=lambda picked: "-".join(map(str, picked))
)
def test_block_scaled_mma(picked: tuple[int, int, int, int], sm: int, ways: Ways) -> None:
    """Every element of every lane, all bytes of a scale and all lanes that may hold one."""
    body, words, rows, columns = scaled_case(sum(picked), *picked)
    left, right = matrices_of(words[:, :4], words[:, 4:6])
    product = (left @ right) * 2.0 ** (rows - 127)[:, None] * 2.0 ** (columns - 127)[None, :]
    wanted = spread_of(product) + floats(words[:, 6:10])
    terms = spread_of(np.abs(left) @ np.abs(right) * 2.0 ** (rows - 127)[:, None] * 2.0 ** (columns - 127)[None, :])
    for got in ways.both(body, words, 4, sm):
        assert (np.abs(floats(got) - wanted) <= ways.sum_error * (terms + np.abs(wanted)) + 1e-38).all()


@pytest.mark.parametrize("sm", [80, 90])
def test_every_scale_byte(sm: int, ways: Ways) -> None:
    """0 is 2**-127 and 255 is NaN; with the other side's scale the product of both may be anything float32 holds."""
    for byte in range(0, 256, 1 if sm == 90 else 15):
        body, words, _, _ = scaled_case(byte, 0, 0, 0, 0)
        words[:, 6:10] = 0
        opposite = min(max(254 - byte, 0), 254)
        words[:, 10], words[:, 11] = byte * 0x01010101, opposite * 0x01010101
        left, right = matrices_of(words[:, :4], words[:, 4:6])
        for got in ways.both(body, words, 4, sm):
            if byte == 255:
                assert np.isnan(floats(got)).all()
                continue
            exact = spread_of(left @ right) * 2.0 ** (byte + opposite - 254)
            size = spread_of(np.abs(left) @ np.abs(right))
            assert (np.abs(floats(got) - exact) <= ways.sum_error * size).all(), byte


@pytest.mark.parametrize("sm", SMS)
def test_a_nan_code_reaches_its_row_or_column_alone(sm: int, ways: Ways) -> None:
    body, words, _, _ = scaled_case(5, 0, 0, 0, 0)
    words[9, 1] = words[9, 1] & np.uint32(0xFFFF00FF) | np.uint32(0x7F00)  # row 9 / 4 + 8 of A
    for got in ways.both(body, words, 4, sm):
        nan = np.isnan(floats(got))
        assert (nan == spread_of(np.arange(16)[:, None] == np.full((1, 8), 10)).astype(bool)).all()


@pytest.mark.parametrize("sm", [80, 86])
def test_fp8_mma(sm: int, ways: Ways) -> None:
    _, words, _, _ = scaled_case(7, 0, 0, 0, 0)
    body = (
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%o0, %o1, %o2, %o3}, {%i0, %i1, %i2, %i3}, {%i4, %i5}, "
        "{%i6, %i7, %i8, %i9};"
    )
    left, right = matrices_of(words[:, :4], words[:, 4:6])
    wanted = spread_of(left @ right) + floats(words[:, 6:10])
    size = spread_of(np.abs(left) @ np.abs(right)) + 1
    for got in ways.both(body, words, 4, sm):
        assert (np.abs(floats(got) - wanted) <= ways.sum_error * size).all()


def nvfp4_words(seed: int) -> Words:
    """Every E2M1 code, and scales that are numbers. Their highest bit is not used."""
    generator = np.random.default_rng(seed)
    words = random_words(12, seed)
    words[:, 6:10] = generator.normal(0, 100, (32, 4)).astype(np.float32).view(np.uint32)
    scales = generator.integers(0, 127, (32, 8)) + generator.choice([0, 128], (32, 8))
    words[:, 10:] = scales.astype(np.uint8).view(np.uint32)
    return words


def nvfp4_near(got: Words, words: Words, thread_a: int = 0, thread_b: int = 0) -> bool:
    """Whether all of D is the addend and the four groups, up to the rounding of their sum."""
    left, right = matrices_of(words[:, :4], words[:, 4:6], "e2m1")
    codes = np.ascontiguousarray(words[:, 10:]).view(np.uint8).reshape(32, 2, 4)
    scales = code_values("e4m3")[codes & 127]  # [lane, A or B, group]
    rows = np.array([scales[4 * (row % 8) + 2 * thread_a + row // 8, 0] for row in range(16)])
    columns = np.array([scales[4 * column + thread_b, 1] for column in range(8)])
    terms = [floats(words[:, 6:10]).astype(np.float64)]
    for group in range(4):
        here = slice(16 * group, 16 * group + 16)
        terms.append(spread_of(left[:, here] @ right[here] * rows[:, None, group] * columns[None, :, group]))
    ours, wanted, size = floats(got), np.sum(terms, 0), np.sum(np.abs(terms), 0)
    return bool(((np.abs(ours - wanted) <= 2.0**-22 * size) | (np.isnan(ours) & np.isnan(wanted))).all())


@pytest.mark.parametrize("sm", SMS)
@pytest.mark.parametrize("threads", [(0, 0), (1, 3), (0, 2)], ids=str)
def test_nvfp4_mma(threads: tuple[int, int], sm: int, ways: Ways) -> None:
    """Every element of every lane, all bytes of a scale and all lanes that may hold one."""
    words = nvfp4_words(sum(threads))
    for got in ways.both(scaled_mma(NVFP4_MMA, thread_a=threads[0], thread_b=threads[1]), words, 4, sm):
        assert nvfp4_near(got, words, *threads)


@pytest.mark.parametrize("sm", [80, 90])
def test_every_nvfp4_scale(sm: int, ways: Ways) -> None:
    """A NaN (127) reaches its row or its column alone. The lanes that hold no scale have NaN."""
    rows, columns = np.arange(16), np.arange(8)
    for first in range(0, 128, 32):
        words = nvfp4_words(first)
        words[:, 10:] = 0x7F7F7F7F
        codes = (2 * first + np.arange(64)) % 128, first + np.arange(32)
        scales = [each.astype(np.uint8).view(np.uint32) for each in codes]
        words[4 * (rows % 8) + rows // 8, 10], words[4 * columns, 11] = scales
        for got in ways.both(scaled_mma(NVFP4_MMA), words, 4, sm):
            assert nvfp4_near(got, words)


@pytest.mark.parametrize(
    "fault",
    [
        "shfl.sync.bfly.b32 %i10, %i10, 1, 31, -1;",  # rows g and g + 8
        "shfl.sync.bfly.b32 %i10, %i10, 4, 31, -1;",  # rows g and g + 1
        "shfl.sync.bfly.b32 %i11, %i11, 4, 31, -1;",  # columns g and g + 1
        "prmt.b32 %i10, %i10, 0, 0x3201;",  # bytes 0 and 1
        "prmt.b32 %i11, %i11, 0, 0x2310;",  # bytes 2 and 3
    ],
    ids=["half of rows", "row", "column", "byte of A", "byte of B"],
)
def test_a_wrong_nvfp4_scale_shows(fault: str, ways: Ways) -> None:
    words = nvfp4_words(3)
    for got in ways.both(f"{fault} {scaled_mma(NVFP4_MMA)}", words, 4, 90):
        assert not nvfp4_near(got, words)
