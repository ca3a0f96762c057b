"""The instructions on mbarriers, whose state is in ``phases``."""

from __future__ import annotations

from collections.abc import Callable

from ptxproof.interpreter.lanes import Lanes, Mask
from ptxproof.interpreter.numbers import Array
from ptxproof.interpreter.operands import Operands, Step, unknown
from ptxproof.ptx import PtxInstruction

Wait = Callable[[Lanes, Mask], Array]
"""Gives the lanes that need not wait any longer."""


def build_mbarrier(ops: Operands, instruction: PtxInstruction) -> Step:
    """``mbarrier.init`` and ``mbarrier.arrive`` without a result."""
    parts = instruction.opcode.replace("::", ".").split(".")
    if parts[1] == "init":
        address, count = ops.address(instruction.operands[0], 32), ops.read(instruction.operands[1], 32)

        def make(lanes: Lanes, active: Mask) -> None:
            selected = lanes.selected(active)
            counts = lanes.wide(count(lanes, active))[selected]
            addresses = lanes.wide(address(lanes, active))[selected]
            lanes.refuse_undefined("an mbarrier's address or count", active)
            lanes.mbarriers.make(addresses, counts, selected)

        return make
    if parts[1] == "inval":
        return lambda lanes, active: None
    if (
        parts[1] == "arrive"
        and instruction.operands[0] == "_"
        and len(instruction.operands) == 2
        and "expect_tx" not in parts
    ):
        return _arrival(ops, instruction.operands[1], copies=False)
    raise unknown(instruction)


def build_copy_arrival(ops: Operands, instruction: PtxInstruction) -> Step:
    """``cp.async.mbarrier.arrive.noinc``: an arrival when the thread's copies have come, which here is at once."""
    if "noinc" not in instruction.opcode.split("."):
        raise unknown(instruction)
    return _arrival(ops, instruction.operands[0], copies=True)


def _arrival(ops: Operands, operand: str, *, copies: bool) -> Step:
    address = ops.address(operand, 32)

    def arrive(lanes: Lanes, active: Mask) -> None:
        selected = lanes.selected(active)
        addresses = lanes.wide(address(lanes, active))[selected]
        lanes.refuse_undefined("an mbarrier's address", active)
        if copies:
            lanes.shared.copies_arrive(selected)
        lanes.mbarriers.arrive(addresses, selected)

    return arrive


def build_wait(ops: Operands, instruction: PtxInstruction) -> Wait:
    """``mbarrier.try_wait.parity``, which here waits as long as it takes."""
    if ".parity." not in instruction.opcode or instruction.guard is not None:
        raise unknown(instruction)
    write = ops.write(instruction.operands[0])
    address, parity = ops.address(instruction.operands[1], 32), ops.read(instruction.operands[2], 32)

    def wait(lanes: Lanes, active: Mask) -> Array:
        lanes.where = f"{lanes.program.name}, {instruction.opcode}"
        lanes.undefined = None
        selected = lanes.selected(active)
        addresses = lanes.wide(address(lanes, active))[selected]
        parities = lanes.wide(parity(lanes, active))[selected]
        lanes.refuse_undefined("an mbarrier's address or parity", active)
        ready = lanes.mbarriers.passed(addresses, parities, selected)
        if ready.any():
            write(lanes, ready, None if ready.all() else ready)
        return ready

    return wait
