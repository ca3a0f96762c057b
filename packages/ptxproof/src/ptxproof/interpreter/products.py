"""Sums of products as a matrix unit makes them (``matrix_units``), bit for bit.

Aligning and cutting off every product is slow here, and for most sums nothing is cut off: those are exact, and a plain
product of matrices in float64 gives them. Only the others are gone through product by product.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from ptxproof.interpreter import numbers
from ptxproof.interpreter.numbers import Array
from ptxproof.matrix_units import Summation

_SMALLEST = {"bf16": -126, "f16": -14, "e4m3": -6, "e5m2": -14, "e2m1": 0}
"""The exponent of each type's subnormal numbers."""
_ZERO = -126
"""The exponent that a unit takes a zero to have."""
_NOTHING = 8000
"""Where the lowest bit of a zero is: below no other."""
NAN = np.uint32(0x7FFFFFFF).view(np.float32)
"""The one that a matrix unit gives."""
WIDTH = {"bf16": 16, "f16": 16, "e4m3": 8, "e5m2": 8}


@dataclass(frozen=True)
class Rows:
    """Rows of A or columns of B, ``[warps, rows, k]``."""

    values: Array
    """float64"""
    exponents: Array
    lowest: Array
    """The exponent of each number's lowest bit that is set."""

    @classmethod
    def decode(cls, codes: Array, kind: str) -> Rows:
        """``codes``: unsigned numbers as wide as the type."""
        values, exponents, lowest = _tables(kind)
        return cls(values[codes], exponents[codes], lowest[codes])

    def part(self, first: int, count: int) -> Rows:
        here = slice(first, first + count)
        return Rows(self.values[..., here], self.exponents[..., here], self.lowest[..., here])


@cache
def _tables(kind: str) -> tuple[Array, Array, Array]:
    values = numbers.code_values(kind)
    finite = np.where(np.isfinite(values), values, 0.0)
    exponents = np.maximum(np.frexp(finite)[1] - 1, _SMALLEST[kind])
    whole = np.abs(finite / 2.0 ** (_SMALLEST[kind] - 10.0))
    significand, power = np.frexp(whole)
    bits = (significand * 2**24).astype(np.int64)
    lowest = np.log2(np.maximum(bits & -bits, 1)).astype(np.int64) - 24 + power + _SMALLEST[kind] - 10
    zero = finite == 0
    return (
        values,
        np.where(zero, _ZERO, exponents).astype(np.int16),
        np.where(zero, _NOTHING, lowest).astype(np.int16),
    )


def dot_add(a: Rows, b: Rows, addend: Array, how: Summation, scales: Array | None = None) -> Array:
    """``a [warps, m, k]`` times ``b [warps, n, k]`` and ``addend [warps, m, n]``, in float32.

    ``scales [warps, m, n]``: exponents of two that the products are multiplied by.
    """
    total = addend
    with np.errstate(all="ignore"):
        for first in range(0, a.values.shape[-1], how.products):
            total = _sum(a.part(first, how.products), b.part(first, how.products), total, how, scales)
    return total


def _sum(a: Rows, b: Rows, addend: Array, how: Summation, scales: Array | None) -> Array:
    """The addend and all products at once."""
    above = np.zeros((1, 1, 1), np.int16) if scales is None else scales
    largest = np.maximum(_largest(a, b) + above, _exponents(addend))
    unit = largest - np.int16(how.fraction_bits)  # the exponent of the last bit that is kept
    products = a.values @ b.values.swapaxes(-1, -2)
    products = products if scales is None else products * _power(scales)
    lowest = a.lowest.min(-1)[:, :, None] + b.lowest.min(-1)[:, None, :] + above
    cut = np.nonzero(lowest < unit)
    if cut[0].size:
        products[cut] = _cut_sum(a, b, cut, unit, above)
    total = products + _cut(addend.astype(np.float64), unit) + 0.0  # a sum of zeros is +0
    result = _towards_zero(total, how.result_bits)
    finite = np.isfinite(a.values).all() and np.isfinite(b.values).all() and np.isfinite(addend).all()
    return result if finite else _with_infinities(a.values @ b.values.swapaxes(-1, -2) + addend, result)


def grouped_dot_add(a: Rows, b: Rows, addend: Array, how: Summation, scales_a: Rows, scales_b: Rows) -> Array:
    """As ``dot_add`` where each row has several groups along k and a scale for each of them:
    ``scales_a [warps, m, groups]``, ``scales_b [warps, n, groups]``.

    A group is summed exactly, and its exponent is that of its scales. If all of its products are zero, it counts as a
    zero; if they only add up to zero, it does not.
    """
    groups = scales_a.values.shape[-1]
    left, right = (rows.values.reshape(*rows.values.shape[:2], groups, -1).swapaxes(1, 2) for rows in (a, b))
    # [warps, groups, m, 1] and [warps, groups, 1, n]
    scale_a, exponent_a = (part.swapaxes(1, 2)[..., None] for part in (scales_a.values, scales_a.exponents))
    scale_b, exponent_b = (part.swapaxes(1, 2)[:, :, None] for part in (scales_b.values, scales_b.exponents))
    with np.errstate(all="ignore"):
        sums = left @ right.swapaxes(-1, -2) * (scale_a * scale_b)
        exponents = np.where((left != 0) @ (right != 0).swapaxes(-1, -2), exponent_a + exponent_b, np.int16(_ZERO))
        unit = np.maximum(exponents.max(1), _exponents(addend)) - np.int16(how.fraction_bits)
        total = _cut(sums, unit[:, None]).sum(1) + _cut(addend.astype(np.float64), unit) + 0.0
        return _with_infinities(sums.sum(1) + addend, _towards_zero(total, how.result_bits))


def _largest(a: Rows, b: Rows) -> Array:
    """The largest exponent of the products, ``[warps, m, n]``. The warps come last, so that NumPy's inner loop is long
    and the maximum is one over whole rows of memory."""
    left, right = (np.ascontiguousarray(rows.exponents.transpose(2, 1, 0)) for rows in (a, b))
    largest: Array = (left[:, :, None] + right[:, None]).max(0)
    return largest.transpose(2, 0, 1)


def _exponents(values: Array) -> Array:
    bits = np.ascontiguousarray(values).view(np.uint32) >> np.uint32(23) & np.uint32(255)
    exponents: Array = np.maximum(bits, np.uint32(1)).astype(np.int16) - np.int16(127)
    return exponents


def _cut(values: Array, unit: Array) -> Array:
    """Towards zero, to whole units."""
    whole: Array = np.trunc(values * _power(-unit)) * _power(unit)
    return whole


def _power(exponents: Array) -> Array:
    """Of two, in float64."""
    return ((exponents.astype(np.int64) + 1023) << 52).view(np.float64)


def _cut_sum(a: Rows, b: Rows, places: tuple[Array, ...], unit: Array, above: Array) -> Array:
    """The products of some rows and columns, each cut off before they are summed."""
    warps, rows, columns = places
    down = (np.broadcast_to(above, unit.shape) - unit)[places]
    products = a.values[warps, rows] * b.values[warps, columns]
    products *= _power(down)[:, None]
    np.trunc(products, out=products)
    total: Array = products.sum(1) * _power(unit[places])
    return total


def _towards_zero(values: Array, bits: int) -> Array:
    """float64 to float32 with ``bits`` fraction bits. From 2**128 on it is an infinity."""
    near = values.astype(np.float32)
    beyond = (np.abs(near) > np.abs(values)) & (np.abs(values) < 2.0**128)
    whole = near.view(np.uint32) - beyond.astype(np.uint32)
    return (whole & np.uint32(0xFFFFFFFF << (23 - bits) & 0xFFFFFFFF)).view(np.float32)


def _with_infinities(plain: Array, result: Array) -> Array:
    """Where an infinity or a NaN is among the numbers, the sum as floats have it decides; every NaN is the same."""
    special = np.where(np.isnan(plain), NAN, plain.astype(np.float32))
    return np.where(np.isfinite(plain), result, special)
