"""The numbers of PTX over NumPy arrays, rounded as the manual says."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
UNSIGNED: dict[int, type[np.generic]] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, type[np.generic]] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS: dict[str, type[np.generic]] = {"f16": np.float16, "f32": np.float32, "f64": np.float64}

_EXPONENT_AND_MANTISSA = {"bf16": (8, 7), "f16": (5, 10), "e4m3": (4, 3), "e5m2": (5, 2), "e2m1": (2, 1)}
"""Bits of each float format that is not NumPy's own, or whose codes are decoded by table."""


@cache
def code_values(kind: str) -> Array:
    """The value of every code of a float format, in float64.

    It is computed from the bits: to cast an array with NaN codes gives a RuntimeWarning or none, by platform.
    """
    exponent_bits, mantissa_bits = _EXPONENT_AND_MANTISSA[kind]
    sign_bit = 1 << (exponent_bits + mantissa_bits)
    codes = np.arange(2 * sign_bit)
    magnitudes = codes & (sign_bit - 1)
    exponents, mantissas = magnitudes >> mantissa_bits, magnitudes & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    significands = mantissas + np.where(exponents > 0, 1 << mantissa_bits, 0)
    values = np.ldexp(significands.astype(np.float64), np.maximum(exponents, 1) - bias - mantissa_bits)
    if kind == "e4m3":  # no infinities, and one NaN
        values[magnitudes == sign_bit - 1] = np.nan
    elif kind != "e2m1":  # all of whose codes are finite
        values[exponents == (1 << exponent_bits) - 1] = np.nan
        values[magnitudes == ((1 << exponent_bits) - 1) << mantissa_bits] = np.inf
    signed: Array = np.where(codes & sign_bit, -values, values)
    return signed


@cache
def bits_of(kind: str) -> int:
    """The width of a type: of ``u32`` 32, of ``bf16x2`` 32, of ``e4m3x2`` 16."""
    if kind == "pred":
        return 1
    base, _, times = kind.partition("x")
    widths = {"e4m3": 8, "e5m2": 8, "ue8m0": 8, "tf32": 32}
    return (widths.get(base) or int(base.lstrip("busf"))) * int(times or 1)


def from_bf16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def truncated_to_bf16(values: Array) -> Array:
    """float32 numbers without the bits that bf16 does not have."""
    kept = (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(values), values, kept)


def to_bf16(values: Array) -> Array:
    """To nearest even; every NaN is 0x7FFF, as hardware has it."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded.astype(np.uint16))


def to_e4m3(values: Array) -> Array:
    """``cvt.rn.satfinite``: to nearest even, at most 448."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    exponent = np.maximum(np.floor(np.log2(np.maximum(magnitude, 2.0**-20))), -6.0)
    step = 2.0 ** (exponent - 3)
    rounded = np.rint(magnitude / step) * step  # np.rint takes the even one of two
    codes = np.searchsorted(code_values("e4m3")[:127], rounded)
    signed = codes | np.where(np.signbit(values), 128, 0)
    return np.where(np.isnan(values), 0x7F, signed).astype(np.uint8)


def flushed(values: Array) -> Array:
    """``.ftz``: subnormal float32 become zeros of their sign."""
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values)


def fma(a: Array, b: Array, c: Array) -> Array:
    """``a b + c`` of float32, rounded once.

    In float64 the product is exact, and the sum is rounded to odd, so that the step to float32 is the only rounding
    that counts.
    """
    product = a.astype(np.float64) * b
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    rest = (product - (total - part)) + (addend - part)
    bits = total.view(np.int64)
    inexact = np.isfinite(total) & (rest != 0) & (bits & 1 == 0)
    away = (rest > 0) == (total > 0)
    odd = bits + np.where(inexact, np.where(away, 1, -1), 0)
    return odd.view(np.float64).astype(np.float32)


def fma_rounded(a: Array, b: Array, c: Array) -> Array:
    """As ``fma`` for float64 operands of few bits, such as two bf16 and their product: exact in float64."""
    return a * b + c


def divided(a: Array, b: Array) -> Array:
    """Integers, towards zero; by zero all ones, as hardware has it."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~np.zeros_like(a), a // np.where(b == 0, 1, b).astype(a.dtype))
    quotient = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    signed = np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)
    return np.where(b == 0, np.array(-1, a.dtype), signed)


def remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, a - divided(a, b) * b)


def high_product(a: Array, b: Array) -> Array:
    """The upper half of the product of integers of 32 or 64 bits."""
    if a.dtype.itemsize == 8:
        exact = a.astype(object) * b.astype(object)
        return np.array([int(each) >> 64 & (2**64 - 1) for each in np.ravel(exact)], np.uint64)
    wide: Any = np.int64 if a.dtype.kind == "i" else np.uint64
    upper: Array = ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(np.uint32)
    return upper


def leading_zeros(x: Array) -> Array:
    width = x.dtype.itemsize * 8
    significant = np.zeros(x.shape, np.uint32)
    rest = x.copy()
    for step in (32, 16, 8, 4, 2, 1):
        if step < width:
            above = rest >> x.dtype.type(step) != 0
            significant += np.where(above, np.uint32(step), np.uint32(0))
            rest = np.where(above, rest >> x.dtype.type(step), rest)
    return np.where(x == 0, np.uint32(width), np.uint32(width - 1) - significant)


def permuted(a: Array, b: Array, selector: Array) -> Array:
    """``prmt``: each nibble of the selector picks a byte of ``b:a``, or with its highest bit that byte's sign."""
    pair = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros(a.shape, np.uint32)
    for place in range(4):
        nibble = (selector >> np.uint32(4 * place)) & np.uint32(15)
        byte = ((pair >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * place)
    return result


def lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    result = np.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result
