"""``mov``, ``cvt`` and their like: numbers from one type to another, registers into parts and together."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ptxproof.interpreter import numbers
from ptxproof.interpreter.lanes import Lanes, Mask
from ptxproof.interpreter.memory import WINDOW_BITS, WINDOWS
from ptxproof.interpreter.numbers import UNSIGNED, Array, bits_of
from ptxproof.interpreter.operands import Operands, Step, elementwise, number_type, unknown
from ptxproof.ptx import PtxInstruction

_TYPE = re.compile(r"(?:bf16|f16|f32|f64|[sub]\d+|e4m3|e5m2|e2m1|ue8m0|tf32)(?:x[24])?")
_TO_INTEGER: dict[str, Callable[..., Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def build_move(ops: Operands, instruction: PtxInstruction) -> Step:
    target, source = instruction.operands
    bits = bits_of(instruction.opcode.rpartition(".")[2])
    if target.startswith("{"):
        return _unpacked(ops, target, source, bits)
    if source.startswith("{"):
        parts = ops.list_of(source)
        reads = [ops.read_unset(part, bits // len(parts)) for part in parts]
        whole: Any = UNSIGNED[bits]

        def packed(*values: Array) -> Array:
            together: Array = np.stack(np.broadcast_arrays(*values), -1).view(whole).reshape(-1)
            return together

        return elementwise(ops.write(target), packed, *reads)
    return elementwise(ops.write(target), lambda x: x, ops.read(source, bits))


def _unpacked(ops: Operands, target: str, source: str, bits: int) -> Step:
    parts = ops.list_of(target)
    writes = [ops.write(part) for part in parts]
    read = ops.read(source, bits)
    part_type: Any = UNSIGNED[bits // len(parts)]

    def step(lanes: Lanes, active: Mask) -> None:
        rows = np.ascontiguousarray(read(lanes, active)).view(part_type).reshape(-1, len(parts))
        for at, write in enumerate(writes):
            write(lanes, np.ascontiguousarray(rows[:, at]), active)

    return step


def build_address(ops: Operands, instruction: PtxInstruction) -> Step:
    """``cvta.local`` makes a generic address, ``cvta.to.local`` the reverse. Global addresses are generic already."""
    parts = instruction.opcode.replace("::", ".").split(".")
    if "param" in parts:
        raise unknown(instruction)
    window = np.uint64(next((WINDOWS[part] for part in parts if part in WINDOWS), 0) << WINDOW_BITS)
    convert = np.subtract if "to" in parts else np.add
    return elementwise(
        ops.write(instruction.operands[0]), lambda x: convert(x, window), ops.read(instruction.operands[1], 64)
    )


def build_conversion(ops: Operands, instruction: PtxInstruction) -> Step:
    parts = instruction.opcode.split(".")[1:]
    kinds = [part for part in parts if _TYPE.fullmatch(part)]
    to, source = kinds[0], kinds[-1]
    if to.endswith("x2"):
        return _to_pair(ops, instruction, to, source)
    read = ops.typed(instruction.operands[1], source)
    write = ops.write(instruction.operands[0], to)
    rounding = next((_TO_INTEGER[part] for part in parts if part in _TO_INTEGER), None)
    if _is_float(source) and _is_float(to):
        if "rz" in parts and (source, to) == ("f32", "bf16"):
            return elementwise(write, numbers.truncated_to_bf16, read)
        if {"rz", "rm", "rp"} & set(parts):
            raise unknown(instruction)
        return elementwise(write, _float_to_float(to, rounding, "ftz" in parts), read)
    if _is_float(source):
        assert rounding is not None
        function = _float_to_integer(number_type(to), rounding)
        return elementwise(write, (lambda x: function(numbers.flushed(x))) if "ftz" in parts else function, read)
    dtype: Any = number_type(to)
    if to == "bf16":
        raise unknown(instruction)
    if "sat" in parts:
        limits = np.iinfo(dtype)
        return elementwise(write, lambda x: np.clip(x, limits.min, limits.max).astype(dtype), read)
    return elementwise(write, lambda x: x.astype(dtype), read)


def _is_float(kind: str) -> bool:
    return kind in ("f16", "f32", "f64", "bf16")


def _float_to_float(to: str, rounding: Callable[..., Array] | None, ftz: bool) -> Callable[[Array], Array]:
    dtype: Any = np.float32 if to == "bf16" else number_type(to)

    def run(x: Array) -> Array:
        x = numbers.flushed(x) if ftz else x
        x = x if rounding is None else rounding(x)
        x = x.astype(dtype)
        return numbers.flushed(x) if ftz and to == "f32" else x

    return run


def _float_to_integer(dtype: type[np.generic], rounding: Callable[..., Array]) -> Callable[[Array], Array]:
    """Out of range: the nearest integer that there is. NaN: 0."""
    limits = np.iinfo(dtype)  # type: ignore[type-var]
    kind: Any = dtype

    def run(x: Array) -> Array:
        whole = rounding(x.astype(np.float64))
        low, high = whole <= float(limits.min), whole >= float(limits.max)
        inside = np.where(low | high | np.isnan(whole), 0.0, whole).astype(kind)
        return np.where(low, kind(limits.min), np.where(high, kind(limits.max), inside)).astype(kind)

    return run


def _to_pair(ops: Operands, instruction: PtxInstruction, to: str, source: str) -> Step:
    """``cvt.rn.bf16x2.f32 d, a, b``: ``a`` is the upper half; ``cvt.rn.f16x2.e4m3x2 d, a``."""
    if ".relu" in instruction.opcode:
        raise unknown(instruction)
    write = ops.write(instruction.operands[0])
    if source in ("e4m3x2", "e5m2x2") and to == "f16x2":
        values = numbers.code_values(source.removesuffix("x2"))
        halves = np.where(np.isnan(values), 0.0, values).astype(np.float16).view(np.uint16)
        table = np.where(np.isnan(values), np.uint16(0x7FFF), halves)

        def widened(bits: Array) -> Array:
            pairs = table[np.ascontiguousarray(bits).view(np.uint8).reshape(-1, 2)]
            return np.ascontiguousarray(pairs).view(np.uint32).reshape(-1)

        return elementwise(write, widened, ops.read(instruction.operands[1], 16))
    narrow: dict[str, Callable[[Array], Array]] = {
        "bf16x2": numbers.to_bf16,
        "f16x2": lambda x: x.astype(np.float16).view(np.uint16),
        "e4m3x2": numbers.to_e4m3,
    }
    if source != "f32" or to not in narrow or (".rz" in instruction.opcode and to != "bf16x2"):
        raise unknown(instruction)
    truncates = ".rz" in instruction.opcode
    function = (lambda x: numbers.to_bf16(numbers.truncated_to_bf16(x))) if truncates else narrow[to]
    whole: Any = UNSIGNED[bits_of(to)]

    def joined(high: Array, low: Array) -> Array:
        parts = np.stack(np.broadcast_arrays(function(low), function(high)), -1)
        together: Array = np.ascontiguousarray(parts).view(whole).reshape(-1)
        return together

    return elementwise(write, joined, *(ops.typed(operand, "f32") for operand in instruction.operands[1:]))
