"""The matrix units' sums: cases that were worked out by hand, and the published model written a second time with whole
numbers, one product after the other."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from ptx_kernels import Words, run_warp, scaled_mma, warp_kernel
from ptxproof.errors import Unsupported
from ptxproof.instructions import NVFP4_MMA
from ptxproof.interpreter.numbers import Array, code_values, from_bf16
from ptxproof.interpreter.products import Rows, dot_add, grouped_dot_add
from ptxproof.matrix_units import MmaUnit, Summation, summation

LANES = np.arange(32)
SMALLEST = {"bf16": -126, "f16": -14, "e4m3": -6}


def mma(kind: str, k: int) -> str:
    return (
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{kind}.{kind}.f32 {{%o0, %o1, %o2, %o3}}, {{%i0, %i1, %i2, %i3}}, "
        "{%i4, %i5}, {%i6, %i7, %i8, %i9};"
    )


SCALED = {
    "e4m3": "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0",
    "e2m1": NVFP4_MMA,
}


def encode(values: Array, kind: str) -> Array:
    """Numbers that the type holds exactly, as codes; of E2M1 two in a byte."""
    if kind == "bf16":
        return (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if kind == "f16":
        return np.asarray(values, np.float16).view(np.uint16)
    codes = np.array([int(np.flatnonzero(value == code_values(kind))[0]) for value in np.ravel(values)], np.uint8)
    return codes[::2] | codes[1::2] << 4 if kind == "e2m1" else codes.reshape(np.shape(values))


def one_row(kind: str, a: Array, b: Array, c: float, scales: tuple[int, int] = (127, 127)) -> Words:
    """All rows of A are ``a``, all columns of B are ``b``, all of C is ``c``: words of all lanes."""

    def register(codes: Array, half: int) -> Array:
        return codes.view(np.uint32)[4 * half + LANES % 4]

    left, right = encode(a, kind), encode(b, kind)
    columns = [register(left, 0), register(left, 0), register(left, 1), register(left, 1)]
    columns += [register(right, 0), register(right, 1)]
    columns += [np.full(32, np.float32(c).view(np.uint32))] * 4
    columns += [np.full(32, scale, np.uint32) for scale in scales]
    return np.stack(columns, 1).astype(np.uint32)


def run(sm: str, kind: str, a: list[float], b: list[float], c: float, scales: tuple[int, int] | None = None) -> float:
    """The one number that all of D is; A and B are filled up with zeros."""
    k = {"e4m3": 32, "e2m1": 64}.get(kind, 16)
    padded = [np.array(values + [0.0] * (k - len(values))) for values in (a, b)]
    words = one_row(kind, padded[0], padded[1], c, scales or (127, 127))
    body = scaled_mma(SCALED[kind]) if scales else mma(kind, k)
    got = run_warp(warp_kernel(body, words.shape[1], 4, sm), words, 4).view(np.float32)
    assert (got.view(np.uint32) == got.view(np.uint32)[0, 0]).all()
    return float(got[0, 0])


def test_an_a100_keeps_24_bits_below_the_largest_and_sums_eight_products() -> None:
    # 1 + 7 · 2^-25: every one of the small products is below the last bit that is kept.
    small = [2.0**-12] * 7
    assert run("sm_80", "f16", [1.0, *small], [1.0, *[2.0**-13] * 7], 0.0) == 1.0
    # A hundred and more of them in the second half of K change nothing either; as 2^-24 all eight of them count.
    assert run("sm_80", "f16", [1.0] + [0.0] * 7 + [2.0**-12] * 8, [1.0] + [0.0] * 7 + [2.0**-13] * 8, 0.0) == 1.0
    assert run("sm_80", "f16", [1.0] + [0.0] * 7 + [2.0**-12] * 8, [1.0] + [0.0] * 7 + [2.0**-12] * 8, 0.0) == (
        1.0 + 2.0**-21
    )
    # The first eight are summed on their own: 2^-25 + … = 7 · 2^-25 is exact, then 1 arrives and it is cut to 24 bits,
    # and the result to 23: 3.5 → 3 · 2^-24 → 1 · 2^-23.
    assert run("sm_80", "f16", [*small, 0.0, 1.0], [*[2.0**-13] * 7, 0.0, 1.0], 0.0) == 1.0 + 2.0**-23


def test_hopper_and_later_keep_25_bits_and_sum_sixteen_products() -> None:
    for sm in ("sm_90a", "sm_120a", "sm_121a"):
        # 15 · 2^-25 stay whole; the result has 23 fraction bits: 15 / 4 → 3.
        assert run(sm, "f16", [1.0] + [2.0**-12] * 15, [1.0] + [2.0**-13] * 15, 0.0) == 1.0 + 3 * 2.0**-23
        # Order does not matter within the sixteen.
        assert run(sm, "bf16", [2.0**-12] * 15 + [1.0], [2.0**-13] * 15 + [1.0], 0.0) == 1.0 + 3 * 2.0**-23
        assert run(sm, "bf16", [2.0**-13] * 15 + [1.0], [2.0**-13] * 15 + [1.0], 0.0) == 1.0  # 2^-26


def test_sums_are_cut_off_towards_zero_and_a_zero_is_positive() -> None:
    assert run("sm_121a", "f16", [1.0, -(2.0**-13)], [1.0, 2.0**-13], 0.0) == 1.0  # -2^-26 is cut to nothing
    assert run("sm_121a", "f16", [1.0, -(2.0**-12)], [1.0, 2.0**-13], 0.0) == 1.0 - 2.0**-24  # 1 - 2^-25 → cut off
    assert run("sm_121a", "bf16", [-1.0, -(2.0**-12)], [1.0, 2.0**-13], 0.0) == -1.0  # -1 - 2^-25
    assert math.copysign(1, run("sm_121a", "f16", [-0.0], [1.0], -0.0)) == 1
    # The addend is cut off as the products are: 2^-26 next to 1.
    assert run("sm_121a", "f16", [1.0], [1.0], 2.0**-26) == 1.0
    # A product's exponent is the sum of its factors': 1.5 · 1.5 = 2.25 counts as one of exponent 0.
    assert run("sm_121a", "f16", [1.5] + [2.0**-12] * 15, [1.5] + [2.0**-13] * 15, 0.0) == 2.25 + 2.0**-22


def test_fp8_on_ada_keeps_13_bits_and_its_result_has_no_more() -> None:
    assert run("sm_89", "e4m3", [1.0, 2.0**-7], [1.0, 2.0**-7], 0.0) == 1.0  # 2^-14
    assert run("sm_89", "e4m3", [1.0, 2.0**-6], [1.0, 2.0**-7], 0.0) == 1.0 + 2.0**-13
    assert run("sm_89", "e4m3", [], [], 1.0 + 2.0**-13 + 2.0**-14) == 1.0 + 2.0**-13
    assert run("sm_121a", "e4m3", [1.0, 2.0**-7], [1.0, 2.0**-7], 0.0) == 1.0 + 2.0**-14  # RTX Blackwell keeps 25


def test_block_scales_move_the_products_before_they_are_aligned() -> None:
    # Products of 2^-14 · 2^(4 - 2): with an addend of 1 nothing is cut off.
    assert run("sm_120a", "e4m3", [2.0**-7], [2.0**-7], 1.0, (131, 125)) == 1.0 + 2.0**-12
    # 32 of 2^-18 · 2^-8 = 2^-26 are cut to nothing next to 1, and are not without it.
    assert run("sm_120a", "e4m3", [2.0**-9] * 32, [2.0**-9] * 32, 1.0, (123, 123)) == 1.0
    assert run("sm_120a", "e4m3", [2.0**-9] * 32, [2.0**-9] * 32, 0.0, (123, 123)) == 2.0**-21
    assert run("sm_121a", "e4m3", [1.0], [1.0], 0.0, (0, 127)) == 2.0**-127  # subnormal numbers stay
    assert math.isnan(run("sm_121a", "e4m3", [1.0], [1.0], 0.0, (255, 0)))


def groups(*given: list[float]) -> list[float]:
    return [value for group in given for value in group + [0.0] * (16 - len(group))]


def test_groups_of_fp4_are_summed_exactly_and_aligned_by_their_scales() -> None:
    def fp4(a: list[float], c: float, sm: str = "sm_120a") -> float:
        return run(sm, "e2m1", a, [1.0] * 64, c, (scale, scale))

    scale = int(encode(np.array([256.0, 256.0, 2.0**-9, 1.0]), "e4m3").view(np.uint32)[0])
    # Sums of 2^16 and -2^16: of the rest as much is left as 35 bits below 2^16 hold.
    assert fp4(groups([1.0], [-1.0]), 2.0**-19) == 2.0**-19
    assert fp4(groups([1.0], [-1.0]), 2.0**-20) == 0.0
    assert fp4(groups([1.0], [-1.0], [0.5]), 2.0**-19, "sm_121a") == 2.0**-18
    # The exponent is that of the scales also of 96 · 2^16, and of a sum that vanishes, but not of nothing but zeros.
    assert fp4(groups([6.0] * 16, [-6.0] * 16), 2.0**-19) == 2.0**-19
    assert fp4(groups([6.0, -6.0]), 2.0**-20) == 0.0
    assert fp4(groups([]), 2.0**-20) == 2.0**-20
    # An addend of -2^20 cuts sums off at 2^-15.
    assert fp4(groups([4.0] * 4, [], [6.0, 2.0]), -(2.0**20)) == 2.0**-15
    assert fp4(groups([4.0] * 4, [], [6.0, 1.5]), -(2.0**20)) == 0.0
    # The result has 23 fraction bits, and what is below them is cut off: 32 - 2^-19 and no 32.
    assert fp4(groups([], [], [-0.5]), 32.0) == 32.0 - 2.0**-19
    # The highest bit of a scale is not used. 0x7F is NaN, with zeros too.
    assert run("sm_120a", "e2m1", [3.0], [-2.0], 1.0, (0x38383838, 0xB8B8B8B8)) == -5.0
    assert fp4(groups([1.0]), math.inf) == math.inf
    for scales in ((0x38383838, 0x7F383838), (0x38FF3838, 0x38383838)):
        words = one_row("e2m1", np.zeros(64), np.zeros(64), 1.0, scales)
        assert (run_warp(warp_kernel(scaled_mma(NVFP4_MMA), 12, 4, "sm_120a"), words, 4) == 0x7FFFFFFF).all()


def test_infinities_and_overflow() -> None:
    assert run("sm_90a", "bf16", [2.0**127], [2.0**127], 0.0) == math.inf
    assert run("sm_90a", "bf16", [-(2.0**64)], [2.0**64], 0.0) == -math.inf
    assert run("sm_90a", "f16", [math.inf, 1.0], [1.0, 1.0], 0.0) == math.inf
    words = one_row("f16", np.array([math.inf] + [0.0] * 15), np.zeros(16), 0.0)
    got = run_warp(warp_kernel(mma("f16", 16), words.shape[1], 4, "sm_90a"), words, 4)
    assert (got == 0x7FFFFFFF).all()


def exponent(value: float, smallest: int) -> int:
    return -126 if value == 0 else max(math.frexp(value)[1] - 1, smallest)


def one_sum(a: Array, b: Array, c: float, kind: str, how: Summation, scale: int) -> float:
    """The model over fractions: exact but for what it says is cut off."""
    for first in range(0, len(a), how.products):
        here = slice(first, first + how.products)
        terms = [(Fraction(float(c)), exponent(float(c), -126))]
        for x, y in zip(a[here], b[here], strict=True):
            place = exponent(x, SMALLEST[kind]) + exponent(y, SMALLEST[kind]) + scale
            terms.append((Fraction(float(x)) * Fraction(float(y)) * Fraction(2) ** scale, place))
        c = cut_sum(terms, how)
    return c


def one_grouped_sum(a: Array, b: Array, c: float, scales: Array, how: Summation) -> float:
    """Of FP4: ``scales [2, groups]``."""
    terms = [(Fraction(c), exponent(c, -126))]
    for group, (x, y) in enumerate(scales.T):
        here = slice(16 * group, 16 * group + 16)
        total = Fraction(float(a[here] @ b[here])) * Fraction(float(x)) * Fraction(float(y))
        terms.append((total, exponent(x, -6) + exponent(y, -6) if (a[here] * b[here]).any() else -126))
    return cut_sum(terms, how)


def cut_sum(terms: list[tuple[Fraction, int]], how: Summation) -> float:
    """Of terms and their exponents."""
    unit = Fraction(2) ** (max(place for _, place in terms) - how.fraction_bits)
    total = sum((math.trunc(term / unit) * unit for term, _ in terms), Fraction(0))
    step = Fraction(2) ** (exponent(float(total), -126) - how.result_bits)
    return float(math.trunc(total / step) * step)


@pytest.mark.parametrize(
    ("sm", "unit", "kind"),
    [
        (80, MmaUnit.MMA_16, "f16"), (89, MmaUnit.MMA_16, "bf16"), (121, MmaUnit.MMA_16, "bf16"),
        (121, MmaUnit.MMA_16, "f16"), (89, MmaUnit.MMA_8, "e4m3"), (120, MmaUnit.MMA_8, "e4m3"),
        (120, MmaUnit.MMA_BLOCK_SCALED, "e4m3"), (90, MmaUnit.WGMMA_8, "e4m3"),
    ],
)  # fmt: skip
def test_random_numbers_follow_the_model(sm: int, unit: MmaUnit, kind: str) -> None:
    generator = np.random.default_rng(sm)
    how, k = summation(sm, unit), 32 if kind == "e4m3" else 16
    for spread in (1, 40):  # of exponents: near together, where little is cut off, and far apart
        if kind == "e4m3":
            codes = generator.integers(0, 256, (2, 3, 4, k)).astype(np.uint8)
            plain = np.where(codes & 127 == 127, 0, codes) if spread == 40 else codes & 0b10111111 | 0b00110000
            codes = plain.astype(np.uint8)
            values = code_values("e4m3")[codes]
        else:
            numbers = generator.normal(0, 1, (2, 3, 4, k)) * 2.0 ** generator.integers(-spread, 1, (2, 3, 4, k))
            codes = encode(np.where(generator.random(numbers.shape) < 0.1, 0.0, numbers), kind)
            values = codes.view(np.float16).astype(np.float64) if kind == "f16" else from_bf16(codes).astype(np.float64)
        addend = (generator.normal(0, 1, (3, 4, 4)) * 2.0 ** generator.integers(-8, 8, (3, 4, 4))).astype(np.float32)
        scales = None
        if unit is MmaUnit.MMA_BLOCK_SCALED:
            scales = generator.integers(-20, 20, (3, 4, 4)).astype(np.int16)
        got = dot_add(Rows.decode(codes[0], kind), Rows.decode(codes[1], kind), addend, how, scales)
        for at in np.ndindex(3, 4, 4):
            scale = 0 if scales is None else int(scales[at])
            left, right = values[0][at[0], at[1]], values[1][at[0], at[2]]
            wanted = one_sum(left, right, float(addend[at]), kind, how, scale)
            assert float(got[at]) == wanted, (at, spread)


def test_random_fp4_follows_the_model() -> None:
    generator = np.random.default_rng(4)
    how = summation(120, MmaUnit.MMA_BLOCK_SCALED_4)
    for zeros in (0.0, 0.9):
        codes = generator.integers(0, 16, (2, 3, 4, 64)).astype(np.uint8)
        codes[generator.random(codes.shape) < zeros] = 0
        scales = generator.integers(0, 127, (2, 3, 4, 4)).astype(np.uint8)
        addend = (generator.normal(0, 1, (3, 4, 4)) * 2.0 ** generator.integers(-30, 30, (3, 4, 4))).astype(np.float32)
        a, b = (Rows.decode(each, "e2m1") for each in codes)
        of_a, of_b = (Rows.decode(each, "e4m3") for each in scales)
        got = grouped_dot_add(a, b, addend, how, of_a, of_b)
        for at in np.ndindex(3, 4, 4):
            row, column = at[:2], at[::2]
            both = np.stack([of_a.values[row], of_b.values[column]])
            wanted = one_grouped_sum(a.values[row], b.values[column], float(addend[at]), both, how)
            assert float(got[at]) == wanted, at


def test_what_nobody_has_published_is_refused_or_says_what_stands_in() -> None:
    with pytest.raises(Unsupported, match=r"SM 8\.0 sums the products of a block-scaled mma"):
        summation(80, MmaUnit.MMA_BLOCK_SCALED)
    assert "nothing is published for SM 12.1" in summation(121, MmaUnit.MMA_BLOCK_SCALED).source
