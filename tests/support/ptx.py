"""Executes the inline assembly of the Gluon kernels on a CPU, word for word: the interpreter of Triton cannot.

Only the instructions that those texts use. Values are int64 tensors that hold 32-bit words.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    out = torch.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            x, y, z = ((v if row >> bit & 1 else ~v) for v, bit in ((a, 2), (b, 1), (c, 0)))
            out |= x & y & z
    return out & WORD


def _prmt(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    if bool((selector & 0x8888).any()):
        raise NotImplementedError("prmt that copies signs")
    low = torch.stack([(word >> 8 * i & 0xFF).expand_as(selector) for word in (a, b) for i in range(4)])
    picked = [low.gather(0, (selector >> 4 * i & 7)[None])[0] << 8 * i for i in range(4)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def _max_s16x2(a: Tensor, b: Tensor) -> Tensor:
    def signed(half: Tensor) -> Tensor:
        return ((half & 0xFFFF) ^ 0x8000) - 0x8000

    halves = [torch.maximum(signed(a >> shift), signed(b >> shift)) & 0xFFFF for shift in (0, 16)]
    return halves[0] | halves[1] << 16


def _bf16x2(op: str, *args: Tensor) -> Tensor:
    halves = []
    for shift in (0, 16):
        parts = [((arg >> shift & 0xFFFF) << 16).to(torch.int32).view(torch.float32).double() for arg in args]
        value = parts[0] * parts[1] + (parts[2] if op == "fma" else 0.0)
        halves.append(value.to(torch.bfloat16).view(torch.int16).long() & 0xFFFF)
    return halves[0] | halves[1] << 16


def execute(text: str, outputs: int, *inputs: Tensor) -> list[Tensor]:
    """The values of ``$0 .. $(outputs - 1)`` with ``inputs`` in the operands after them."""
    shape = torch.broadcast_tensors(*inputs)[0]
    values = {f"${outputs + i}": value.long() & WORD for i, value in enumerate(inputs)}

    def value(name: str) -> Tensor:
        if name in values:
            return values[name]
        return torch.full_like(shape, int(name, 0), dtype=torch.int64)

    statements = re.sub(r"//.*", "", text.strip().strip("{}")).split(";")
    for statement in (raw.strip() for raw in statements):
        if not statement or statement.startswith(".reg"):
            continue
        name, rest = statement.split(None, 1)
        target, *args = (arg.strip() for arg in rest.split(","))
        op = name.split(".")[0]
        if op == "mov":
            result = value(args[0])
        elif op == "and":
            result = value(args[0]) & value(args[1])
        elif op == "add":
            result = value(args[0]) + value(args[1])
        elif op == "shl":
            result = value(args[0]) << int(args[1])
        elif op == "shr":
            result = value(args[0]) >> int(args[1])
        elif name == "shf.r.wrap.b32":
            result = (value(args[1]) << 32 | value(args[0])) >> int(args[2])
        elif op == "lop3":
            result = _lop3(value(args[0]), value(args[1]), value(args[2]), int(args[3], 0))
        elif op == "prmt":
            result = _prmt(value(args[0]), value(args[1]), value(args[2]))
        elif name == "mul.lo.u32":
            result = value(args[0]) * value(args[1])
        elif name == "mad.lo.u32":
            result = value(args[0]) * value(args[1]) + value(args[2])
        elif name == "max.s16x2":
            result = _max_s16x2(value(args[0]), value(args[1]))
        elif name in ("fma.rn.bf16x2", "mul.bf16x2"):
            result = _bf16x2(op, *(value(arg) for arg in args))
        else:
            raise NotImplementedError(name)
        values[target] = result & WORD
    return [values[f"${i}"] for i in range(outputs)]


def halves(words: Tensor) -> tuple[Tensor, Tensor]:
    """The two bf16 numbers of each word, in float32."""
    low, high = (words & 0xFFFF) << 16, words & 0xFFFF0000
    return tuple((bits - ((bits >> 31) << 32)).to(torch.int32).view(torch.float32) for bits in (low, high))  # type: ignore[return-value]
