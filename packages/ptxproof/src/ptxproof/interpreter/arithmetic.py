"""Instructions that compute each lane by itself: integers, floats, bits, comparisons."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxproof.interpreter import numbers
from ptxproof.interpreter.lanes import Lanes, Mask
from ptxproof.interpreter.numbers import Array, bits_of, flushed
from ptxproof.interpreter.operands import Operands, Step, elementwise, number_type, unknown
from ptxproof.ptx import PtxInstruction

_SIMPLE: dict[str, Callable[..., Array]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": numbers.fma}
_PACKED = ("f32x2", "bf16x2", "f16x2", "s16x2", "u16x2")
_APPROXIMATE: dict[str, Callable[[Array], Array]] = {
    "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
    "rcp": lambda x: np.float32(1) / x, "rsqrt": lambda x: np.float32(1) / np.sqrt(x),
}  # fmt: skip


def build_sum(ops: Operands, instruction: PtxInstruction) -> Step:
    """``add``, ``sub``, ``mul``, ``fma``, ``mad`` and ``div`` of any type."""
    parts = instruction.opcode.split(".")
    name, kind = parts[0], parts[-1]
    target, *sources = instruction.operands
    if kind in _PACKED:
        return _packed(ops, instruction, _SIMPLE[name], kind)
    if kind in ("bf16", "f16") and "f32" in parts:  # all but the last are narrow
        reads = [ops.typed(source, kind) for source in sources[:-1]]
        return elementwise(ops.write(target, "f32"), _SIMPLE[name], *reads, ops.typed(sources[-1], "f32"))
    if "cc" in parts or name in ("addc", "madc"):
        return _with_carry(ops, instruction)
    if kind.startswith("f") or kind == "bf16":
        return _float_sum(ops, instruction)
    reads = [ops.typed(source, kind) for source in sources]
    bits = bits_of(kind)
    if "wide" in parts:
        wide = f"{kind[0]}{2 * bits}"
        dtype = number_type(wide)
        if name == "mul":
            return elementwise(ops.write(target, wide), lambda a, b: a.astype(dtype) * b.astype(dtype), *reads)
        last = ops.typed(sources[2], wide)
        return elementwise(
            ops.write(target, wide), lambda a, b, c: a.astype(dtype) * b.astype(dtype) + c, *reads[:2], last
        )
    if "hi" in parts:
        if name != "mul" or bits not in (32, 64):
            raise unknown(instruction)
        return elementwise(ops.write(target), numbers.high_product, *reads)
    functions: dict[str, Callable[..., Array]] = {
        **_SIMPLE, "mad": lambda a, b, c: a * b + c, "div": numbers.divided, "rem": numbers.remainder,
    }  # fmt: skip
    return elementwise(ops.write(target, kind), functions[name], *reads)


def _float_sum(ops: Operands, instruction: PtxInstruction) -> Step:
    parts = instruction.opcode.split(".")
    name, kind = parts[0], parts[-1]
    if {"rz", "rm", "rp"} & set(parts):
        raise unknown(instruction)
    functions: dict[str, Callable[..., Array]] = {**_SIMPLE, "mad": numbers.fma, "div": np.divide}
    if kind == "f64":
        functions["fma"] = functions["mad"] = numbers.fma_rounded
    function = functions[name]
    if kind == "bf16":
        # The sum of two bf16 or of a product and a bf16 is exact in float64 in all but far-off exponents, where the
        # smaller part cannot move the rounding to 8 bits.
        function = _in_float64(function if name != "fma" else numbers.fma_rounded)
    if "ftz" in parts:
        function = _flushing(function)
    if "sat" in parts:
        function = _saturated(function)
    reads = [ops.typed(source, kind) for source in instruction.operands[1:]]
    return elementwise(ops.write(instruction.operands[0], kind), function, *reads)


def _in_float64(function: Callable[..., Array]) -> Callable[..., Array]:
    def run(*args: Array) -> Array:
        return _to_odd_float32(function(*(arg.astype(np.float64) for arg in args)))

    return run


def _to_odd_float32(x: Array) -> Array:
    """float64 to float32, to odd: for a number that will be rounded again."""
    near = x.astype(np.float32)
    rest = x - near.astype(np.float64)
    bits = near.view(np.int32)
    inexact = np.isfinite(near) & (rest != 0) & (bits & 1 == 0)
    away = (rest > 0) == (near > 0)
    return (bits + np.where(inexact, np.where(away, 1, -1), 0).astype(np.int32)).view(np.float32)


def _flushing(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: flushed(function(*(flushed(arg) for arg in args)))


def _saturated(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: np.where(np.isnan(value := function(*args)), np.float32(0), np.clip(value, 0, 1))


def _with_carry(ops: Operands, instruction: PtxInstruction) -> Step:
    """32-bit sums that set or take the carry: ``add.cc``, ``addc``, ``mad.lo.cc``, ``madc.hi`` …"""
    parts = instruction.opcode.split(".")
    name, sets = parts[0], "cc" in parts
    if bits_of(parts[-1]) != 32 or name not in ("add", "addc", "mad", "madc"):
        raise unknown(instruction)
    takes = name in ("addc", "madc")
    write = ops.write(instruction.operands[0])
    reads = [ops.read(source, 32) for source in instruction.operands[1:]]
    low = np.uint64(0xFFFFFFFF)

    def step(lanes: Lanes, active: Mask) -> None:
        values = [read(lanes, active).astype(np.uint64) for read in reads]
        if len(values) == 3:
            product = values[0] * values[1]
            values = [product >> np.uint64(32) if "hi" in parts else product & low, values[2]]
        total = values[0] + values[1] + (lanes.carry if takes else np.uint64(0))
        if sets:
            carry = total >> np.uint64(32)
            lanes.carry = carry if active is None else np.where(active, carry, lanes.carry)
        write(lanes, (total & low).astype(np.uint32), active)

    return step


def _packed(ops: Operands, instruction: PtxInstruction, function: Callable[..., Array], kind: str) -> Step:
    """Both halves of a register by themselves."""
    base = kind.removesuffix("x2")
    if base in ("bf16", "f16"):
        function = _in_float64(numbers.fma_rounded if function is numbers.fma else function)
    elif ".ftz" in instruction.opcode:
        function = _flushing(function)
    whole = np.uint64 if kind == "f32x2" else np.uint32
    part: Any = np.uint32 if kind == "f32x2" else np.uint16

    def halves(bits: Array) -> Array:
        pairs = np.ascontiguousarray(bits).view(part).reshape(-1, 2)
        return numbers.from_bf16(pairs) if base == "bf16" else pairs.view(number_type(base))

    def run(*args: Array) -> Array:
        value = function(*(halves(arg) for arg in args))
        if base == "bf16":
            bits = numbers.to_bf16(value)
        elif base == "f16":
            bits = value.astype(np.float16).view(np.uint16)
        else:
            bits = value.view(part)
        return np.ascontiguousarray(bits).view(whole).reshape(-1)

    reads = [ops.read(source, bits_of(kind)) for source in instruction.operands[1:]]
    return elementwise(ops.write(instruction.operands[0]), run, *reads)


def build_extreme(ops: Operands, instruction: PtxInstruction) -> Step:
    """``min`` and ``max``, of two or three."""
    parts = instruction.opcode.split(".")
    name, kind = parts[0], parts[-1]
    floats = kind[0] in "fb" and kind not in ("b16", "b32", "b64")
    keeps_nan = "NaN" in parts or not floats
    table: dict[tuple[str, bool], Callable[..., Array]] = {
        ("min", True): np.minimum, ("max", True): np.maximum, ("min", False): np.fmin, ("max", False): np.fmax,
    }  # fmt: skip
    two = table[name, keeps_nan]
    if kind in _PACKED:
        return _packed(ops, instruction, two, kind)
    if "xorsign" in parts or "abs" in parts:
        raise unknown(instruction)

    def run(first: Array, *others: Array) -> Array:
        for other in others:
            first = two(first, other)
        return first

    function = _flushing(run) if "ftz" in parts else run
    return elementwise(
        ops.write(instruction.operands[0], kind), function, *(ops.typed(s, kind) for s in instruction.operands[1:])
    )


def build_unary(ops: Operands, instruction: PtxInstruction) -> Step:
    """``abs``, ``neg``, and what the special function units approximate."""
    parts = instruction.opcode.split(".")
    name, kind = parts[0], parts[-1]
    if kind in _PACKED:
        return _packed(ops, instruction, np.negative if name == "neg" else np.abs, kind)
    functions: dict[str, Callable[..., Array]] = {"abs": np.abs, "neg": np.negative, **_APPROXIMATE}
    function = functions[name]
    if "ftz" in parts:
        function = _flushing(function)
    return elementwise(ops.write(instruction.operands[0], kind), function, ops.typed(instruction.operands[1], kind))
