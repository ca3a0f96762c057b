"""Loads, stores, atomics and asynchronous copies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ptxproof.interpreter.lanes import Lanes, Mask
from ptxproof.interpreter.memory import WINDOW_BITS, WINDOWS
from ptxproof.interpreter.numbers import UNSIGNED, Array, bits_of
from ptxproof.interpreter.operands import Operands, Read, Step, Write, number_type, unknown
from ptxproof.ptx import PtxInstruction

_SPACES = ("global", "shared", "local", "param")
GENERIC = "generic"
"""An opcode without a memory's name: the address decides."""


def space_of(opcode: str) -> str:
    """Which memory."""
    parts = opcode.replace("::", ".").split(".")
    return next((space for space in _SPACES if space in parts), GENERIC)


def _by_space(space: str, addresses: Array) -> Iterator[tuple[str, Array, Array | slice]]:
    """Addresses by the memory in which they are, and which of them these are."""
    if space != GENERIC:
        yield space, addresses, slice(None)
        return
    windows = addresses >> np.uint64(WINDOW_BITS)
    for number in np.unique(windows):
        chosen = np.flatnonzero(windows == number)
        name = next((name for name, window in WINDOWS.items() if window == number), None)
        inside = addresses[chosen]
        yield name or "global", inside if name is None else inside & np.uint64((1 << WINDOW_BITS) - 1), chosen


def store_bytes(opcode: str) -> int:
    """Bytes of one number of a load or store."""
    return bits_of(opcode.rpartition(".")[2]) // 8


def build_load(ops: Operands, instruction: PtxInstruction) -> Step:
    kind = instruction.opcode.rpartition(".")[2]
    width, space = bits_of(kind) // 8, space_of(instruction.opcode)
    targets = ops.list_of(instruction.operands[0])
    writes = [ops.write(target, kind) for target in targets]
    dtype: Any = number_type(kind)
    if space == "param":
        return _parameter(instruction, writes[0], dtype)
    address = ops.address(instruction.operands[1], 32 if space in ("shared", "local") else 64)

    def step(lanes: Lanes, active: Mask) -> None:
        selected = lanes.selected(active)
        addresses = lanes.wide(address(lanes, active))[selected]
        lanes.refuse_undefined("loads from an address", active)
        rows = _load_rows(lanes, space, addresses, width, len(targets), selected)
        for at, write in enumerate(writes):
            write(lanes, spread(lanes, rows[:, at], selected, active).view(dtype), active)

    return step


def _parameter(instruction: PtxInstruction, write: Write, dtype: Any) -> Step:
    found = re.fullmatch(r"\[\s*([\w$]+)\s*\]", instruction.operands[1])
    if found is None:
        raise unknown(instruction)
    name = found[1]

    def step(lanes: Lanes, active: Mask) -> None:
        bits = lanes.params[name] & (2 ** (8 * np.dtype(dtype).itemsize) - 1)
        write(lanes, np.array([bits], UNSIGNED[8 * np.dtype(dtype).itemsize]).view(dtype), active)

    return step


def _load_rows(lanes: Lanes, space: str, addresses: Array, width: int, count: int, selected: Array) -> Array:
    rows = np.zeros((len(selected), count), UNSIGNED[8 * width])
    for where, at, chosen in _by_space(space, addresses):
        if where == "shared":
            rows[chosen] = lanes.shared.load(at, width, count, selected[chosen])
        else:
            memory = lanes.local if where == "local" else lanes.memory
            rows[chosen] = memory.load(lanes, at, width, count, selected[chosen])
    return rows


Look = Callable[[Lanes, Mask], None]
"""Loads what another program may be about to change."""


def build_look(ops: Operands, instruction: PtxInstruction) -> Look:
    """``ld.acquire``, ``ld.relaxed`` and ``ld.volatile`` of one number."""
    kind = instruction.opcode.rpartition(".")[2]
    dtype: Any = number_type(kind)
    write, address = ops.write(instruction.operands[0], kind), ops.address(instruction.operands[1], 64)
    parts = instruction.opcode.split(".")
    acquires = "acquire" in parts and not {"gpu", "sys"}.isdisjoint(parts)

    def look(lanes: Lanes, active: Mask) -> None:
        lanes.where = f"{lanes.program.name}, {instruction.opcode}"
        lanes.undefined = None
        selected = lanes.selected(active)
        addresses = lanes.wide(address(lanes, active))[selected]
        lanes.refuse_undefined("loads from an address", active)
        rows = lanes.memory.look(lanes, addresses, bits_of(kind) // 8, selected, acquires=acquires)
        write(lanes, spread(lanes, rows[:, 0], selected, active).view(dtype), active)

    return look


def spread(lanes: Lanes, values: Array, selected: Array, active: Mask) -> Array:
    """Numbers of the active lanes among all lanes."""
    if active is None:
        return np.ascontiguousarray(values)
    everywhere = np.zeros(lanes.num, values.dtype)
    everywhere[selected] = values
    return everywhere


def build_store(ops: Operands, instruction: PtxInstruction) -> Step:
    kind = instruction.opcode.rpartition(".")[2]
    width, space = bits_of(kind) // 8, space_of(instruction.opcode)
    address = ops.address(instruction.operands[0], 32 if space in ("shared", "local") else 64)
    sources = [ops.read(source, 8 * width) for source in ops.list_of(instruction.operands[1])]
    dtype: Any = UNSIGNED[8 * width]

    def step(lanes: Lanes, active: Mask) -> None:
        selected = lanes.selected(active)
        values = [lanes.wide(read(lanes, active))[selected].astype(dtype) for read in sources]
        rows = np.stack(values, -1)
        addresses = lanes.wide(address(lanes, active))[selected]
        lanes.refuse_undefined("stores a number or to an address", active)
        for where, at, chosen in _by_space(space, addresses):
            if where == "shared":
                lanes.shared.store(at, width, rows[chosen], selected[chosen])
            else:
                memory = lanes.local if where == "local" else lanes.memory
                memory.store(lanes, at, width, rows[chosen], selected[chosen])

    return step


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, x: old + x, "max": max, "min": min, "exch": lambda old, x: x,
    "or": lambda old, x: old | x, "and": lambda old, x: old & x, "xor": lambda old, x: old ^ x,
    "inc": lambda old, x: type(old)(0) if old >= x else old + type(old)(1),
}  # fmt: skip


def build_atomic(ops: Operands, instruction: PtxInstruction) -> Step:
    """One lane after the other, in order."""
    parts = instruction.opcode.split(".")
    kind, space = parts[-1], space_of(instruction.opcode)
    name = next((part for part in parts[1:] if part in _ATOMIC or part == "cas"), None)
    if name is None or kind.startswith("bf") or kind.endswith("x2"):
        raise unknown(instruction)
    target, *rest = instruction.operands if parts[0] == "atom" else ("_", *instruction.operands)
    bits, dtype = bits_of(kind), number_type(kind)
    wide = "gpu" in parts or "sys" in parts  # ``cta``: it orders nothing for other blocks
    order = {
        "releases": wide and ("acq_rel" in parts or "release" in parts),
        "acquires": wide and ("acq_rel" in parts or "acquire" in parts),
    }
    write = ops.write(target)
    address = ops.address(rest[0], 32 if space == "shared" else 64)
    sources: list[Read] = [ops.typed(source, kind) for source in rest[1:]]

    def step(lanes: Lanes, active: Mask) -> None:
        selected = lanes.selected(active)
        addresses = lanes.wide(address(lanes, active))[selected]
        values = [lanes.wide(read(lanes, active))[selected] for read in sources]
        lanes.refuse_undefined("changes memory by a number or at an address", active)
        if space == "shared":
            places = lanes.shared.atomic_places(addresses, bits // 8, selected)
            memory = lanes.shared.bytes.view(dtype)
        else:
            places = lanes.memory.accessed(lanes, addresses, bits // 8, 1, selected, writes=True)
            lanes.memory.visible.atomic(lanes, places * (bits // 8), bits // 8, selected, **order)
            memory = lanes.memory.bytes.view(dtype)
        before = np.zeros(len(selected), dtype)
        lanes.memory.changes += space != "shared"
        for at, place in enumerate(places):
            old = before[at] = memory[place]
            if name == "cas":
                memory[place] = values[1][at] if old == values[0][at] else old
            else:
                memory[place] = _ATOMIC[name](old, values[0][at])
        write(lanes, spread(lanes, before, selected, active).view(UNSIGNED[bits]), active)

    return step


def build_copy(ops: Operands, instruction: PtxInstruction) -> Step:
    """``cp.async`` and its groups."""
    parts = instruction.opcode.split(".")
    if "commit_group" in parts:
        return lambda lanes, active: lanes.shared.commit(active)
    if "wait_group" in parts or "wait_all" in parts:
        pending = int(instruction.operands[0], 0) if "wait_group" in parts else 0
        return lambda lanes, active: lanes.shared.wait(pending, active)
    if "bulk" in parts or "mbarrier" in parts:
        raise unknown(instruction)
    to, source = ops.address(instruction.operands[0], 32), ops.address(instruction.operands[1], 64)
    size = int(instruction.operands[2], 0)
    given = ops.read(instruction.operands[3], 32) if len(instruction.operands) > 3 else None

    def step(lanes: Lanes, active: Mask) -> None:
        selected = lanes.selected(active)
        rows = np.zeros((len(selected), size // 4), np.uint32)
        wanted = np.full(len(selected), size) if given is None else lanes.wide(given(lanes, active))[selected]
        if ((wanted != 0) & (wanted != size)).any():
            raise unknown(instruction)
        taken = np.flatnonzero(wanted)
        addresses = lanes.wide(source(lanes, active))[selected][taken]
        rows[taken] = lanes.memory.load(lanes, addresses, 4, size // 4, selected[taken])
        targets = lanes.wide(to(lanes, active))[selected]
        lanes.refuse_undefined("copies from or to an address", active)
        lanes.shared.store(targets, 4, rows, selected, copied=True)

    return step
