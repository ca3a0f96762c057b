"""Instructions of whole warps: shuffles, votes, reductions, and matrices between shared memory and registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ptxproof.interpreter.access import spread
from ptxproof.interpreter.lanes import WARP, Lanes, Mask
from ptxproof.interpreter.numbers import Array
from ptxproof.interpreter.operands import Operands, Step, number_type, unknown
from ptxproof.ptx import PtxInstruction

_REDUCTIONS: dict[str, Any] = {
    "add": np.add, "max": np.maximum, "min": np.minimum,
    "or": np.bitwise_or, "and": np.bitwise_and, "xor": np.bitwise_xor,
}  # fmt: skip


def build_shuffle(ops: Operands, instruction: PtxInstruction) -> Step:
    mode = instruction.opcode.split(".")[2]
    target, *ok = (name.strip() for name in instruction.operands[0].split("|"))
    write, write_ok = ops.write(target), ops.write(ok[0]) if ok else None
    reads = [ops.read(source, 32) for source in instruction.operands[1:4]]
    lane = np.arange(WARP)

    def step(lanes: Lanes, active: Mask) -> None:
        lanes.warps(active)
        value, by, bounds = (lanes.wide(read(lanes, active)).reshape(-1, WARP).astype(np.int64) for read in reads)
        undefined = lanes.undefined
        segment, clamp = bounds >> 8 & 31, bounds & 31
        low = lane & segment
        last = low | (clamp & ~segment)
        by = by & 31
        source = {"bfly": lane ^ by, "idx": low | (by & ~segment), "up": lane - by, "down": lane + by}[mode]
        inside = source >= last if mode == "up" else source <= last
        source = np.where(inside, source, lane)
        taken = np.take_along_axis(value, source, 1)
        if undefined is not None:
            lanes.undefined = np.take_along_axis(undefined.reshape(-1, WARP), source, 1).ravel()
        write(lanes, taken.astype(np.uint32).ravel(), active)
        if write_ok is not None:
            write_ok(lanes, inside.ravel(), active)

    return step


def build_vote(ops: Operands, instruction: PtxInstruction) -> Step:
    mode = instruction.opcode.split(".")[2]
    write, read = ops.write(instruction.operands[0]), ops.read(instruction.operands[1], 1)

    def step(lanes: Lanes, active: Mask) -> None:
        lanes.warps(active)
        holds = lanes.wide(read(lanes, active)).reshape(-1, WARP)
        lanes.undefined_in_warps()
        if mode == "ballot":
            result = (holds.astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1).astype(np.uint32)
        else:
            result = holds.any(1) if mode == "any" else holds.all(1)
        write(lanes, np.repeat(result, WARP), active)

    if mode not in ("ballot", "any", "all"):
        raise unknown(instruction)
    return step


def build_reduction(ops: Operands, instruction: PtxInstruction) -> Step:
    parts = instruction.opcode.split(".")
    name, kind = parts[2], parts[-1]
    if kind.startswith("f"):
        raise unknown(instruction)
    dtype = number_type(kind)
    write, read = ops.write(instruction.operands[0], kind), ops.typed(instruction.operands[1], kind)

    def step(lanes: Lanes, active: Mask) -> None:
        lanes.warps(active)
        rows = lanes.wide(read(lanes, active)).reshape(-1, WARP)
        lanes.undefined_in_warps()
        write(lanes, np.repeat(_REDUCTIONS[name].reduce(rows, axis=1, dtype=dtype), WARP), active)

    return step


def build_load_matrix(ops: Operands, instruction: PtxInstruction) -> Step:
    """``ldmatrix``: lane ``8 k + r`` has the address of row ``r`` of matrix ``k``; lane ``l`` gets columns
    ``2 (l % 4)`` and the next of row ``l / 4``, or with ``.trans`` those rows of that column."""
    count, transposed = _matrices(instruction)
    writes = [ops.write(target) for target in ops.list_of(instruction.operands[0])]
    address = ops.address(instruction.operands[1], 32)

    def step(lanes: Lanes, active: Mask) -> None:
        warps = lanes.warps(active)
        rows_of = (warps[:, None] * WARP + np.arange(8 * count)).ravel()
        addresses = lanes.wide(address(lanes, active))[rows_of]
        lanes.undefined = None  # only the lanes that hold a row's address count
        rows = lanes.shared.load(addresses, 4, 4, rows_of)
        words = _turned(rows.reshape(len(warps), count, 8, 4), transposed).reshape(len(warps), count, WARP)
        selected = (warps[:, None] * WARP + np.arange(WARP)).ravel()
        for at, write in enumerate(writes):
            write(lanes, spread(lanes, words[:, at].ravel(), selected, active), active)

    return step


def build_store_matrix(ops: Operands, instruction: PtxInstruction) -> Step:
    """``stmatrix``: the way back of ``ldmatrix``."""
    count, transposed = _matrices(instruction)
    address = ops.address(instruction.operands[0], 32)
    reads = [ops.read(source, 32) for source in ops.list_of(instruction.operands[1])]

    def step(lanes: Lanes, active: Mask) -> None:
        warps = lanes.warps(active)
        parts = [lanes.wide(read(lanes, active)).reshape(-1, 8, 4)[warps] for read in reads]
        rows = _turned(np.stack(parts, 1), transposed).reshape(-1, 4)
        rows_of = (warps[:, None] * WARP + np.arange(8 * count)).ravel()
        lanes.refuse_undefined("stores a number or to an address", active)
        lanes.shared.store(lanes.wide(address(lanes, active))[rows_of], 4, rows, rows_of)

    return step


def _matrices(instruction: PtxInstruction) -> tuple[int, bool]:
    parts = instruction.opcode.replace("::", ".").split(".")
    if "m8n8" not in parts or parts[-1] != "b16":
        raise unknown(instruction)
    return int(next(part for part in parts if part in ("x1", "x2", "x4"))[1:]), "trans" in parts


def _turned(words: Array, transposed: bool) -> Array:
    """``[warps, matrices, 8 rows, 4 words]``, each matrix of 8 x 8 halves turned if asked."""
    if not transposed:
        return words
    halves = np.ascontiguousarray(words).view(np.uint16)
    return np.ascontiguousarray(halves.swapaxes(2, 3)).view(np.uint32)


def build_warp_barrier(ops: Operands, instruction: PtxInstruction) -> Step:
    def step(lanes: Lanes, active: Mask) -> None:
        lanes.shared.warp_barrier(active)
        lanes.memory.visible.warp_barrier(lanes, active)

    return step


def build_election(ops: Operands, instruction: PtxInstruction) -> Step:
    """``elect.sync``: the first lane of each warp."""
    target, chosen = (name.strip() for name in instruction.operands[0].split("|"))
    write, write_chosen = ops.write(target), ops.write(chosen)

    def step(lanes: Lanes, active: Mask) -> None:
        lanes.warps(active)
        write(lanes, np.zeros(lanes.num, np.uint32), active)
        write_chosen(lanes, lanes.thread % WARP == 0, active)

    return step


def build_dependence(ops: Operands, instruction: PtxInstruction) -> Step:
    """``griddepcontrol``: wait for the launches before, or let the next one begin."""

    def wait(lanes: Lanes, active: Mask) -> None:
        lanes.waited |= True if active is None else active

    def release(lanes: Lanes, active: Mask) -> None:
        lanes.release(active)

    return wait if instruction.opcode.endswith("wait") else release


Builder = Callable[[Operands, PtxInstruction], Step]
