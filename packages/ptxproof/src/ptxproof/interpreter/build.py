"""Instructions as functions over lanes: which module knows which."""

from __future__ import annotations

from ptxproof.errors import NotInterpreted
from ptxproof.interpreter import access, arithmetic, bits, convert, matrix, mbarrier, warp, wgmma
from ptxproof.interpreter.lanes import Lanes, Mask
from ptxproof.interpreter.operands import Operands, Step
from ptxproof.interpreter.program import ProgramLine
from ptxproof.ptx import PtxInstruction

_BUILDERS: dict[str, warp.Builder] = {
    **dict.fromkeys(("add", "sub", "mul", "fma", "mad", "addc", "madc", "div", "rem"), arithmetic.build_sum),
    **dict.fromkeys(("min", "max"), arithmetic.build_extreme),
    **dict.fromkeys(("abs", "neg", "ex2", "lg2", "sqrt", "rsqrt", "rcp", "tanh", "sin", "cos"), arithmetic.build_unary),
    **dict.fromkeys(("and", "or", "xor", "not"), bits.build_bitwise),
    **dict.fromkeys(("shl", "shr"), bits.build_shift),
    **dict.fromkeys(("bfe", "bfi", "shf", "prmt", "lop3", "popc", "clz", "bfind"), bits.build_bits),
    "selp": bits.build_select,
    "setp": bits.build_comparison,
    "mov": convert.build_move,
    "cvt": convert.build_conversion,
    "cvta": convert.build_address,
    "ld": access.build_load,
    "st": access.build_store,
    "atom": access.build_atomic,
    "red": access.build_atomic,
    "cp": access.build_copy,
    "shfl": warp.build_shuffle,
    "vote": warp.build_vote,
    "redux": warp.build_reduction,
    "ldmatrix": warp.build_load_matrix,
    "stmatrix": warp.build_store_matrix,
    "mma": matrix.build_mma,
    "wgmma": wgmma.build_wgmma,
    "mbarrier": mbarrier.build_mbarrier,
    "elect": warp.build_election,
}
_WITHOUT_EFFECT = ("membar", "fence", "prefetch", "nanosleep", "discard", "pragma", "setmaxnreg")


def build(ops: Operands, placed: ProgramLine) -> Step:
    """The function of one instruction; its guard is applied by it."""
    instruction = placed.instruction
    where = f"line {placed.line}, {instruction.opcode}"
    try:
        step = _bare(ops, instruction)
    except NotInterpreted as error:
        raise NotInterpreted(f"{where}: {error}") from None
    except (KeyError, ValueError, IndexError) as error:
        raise NotInterpreted(f"{where}: {instruction} is not interpreted ({type(error).__name__} {error}).") from error
    holds = None if instruction.guard is None else ops.read(instruction.guard, 1)

    def run(lanes: Lanes, active: Mask) -> None:
        lanes.where = f"{lanes.program.name}, {where}"
        lanes.undefined = None
        if holds is not None:
            condition = lanes.wide(holds(lanes, active))
            lanes.refuse_undefined("depends on a predicate", active)
            lanes.undefined = None
            active = condition if active is None else condition & active
            if not active.any():
                return
            active = None if active.all() else active
        step(lanes, active)

    return run


def _bare(ops: Operands, instruction: PtxInstruction) -> Step:
    name = instruction.opcode.partition(".")[0]
    if instruction.opcode.startswith("bar.warp.sync"):
        return warp.build_warp_barrier(ops, instruction)
    if instruction.opcode.startswith("fence.proxy.async"):
        return lambda lanes, active: lanes.shared.fence(active)
    if instruction.opcode.startswith("cp.async.mbarrier"):
        return mbarrier.build_copy_arrival(ops, instruction)
    if name == "griddepcontrol":
        return warp.build_dependence(ops, instruction)
    if name in _WITHOUT_EFFECT:
        return lambda lanes, active: None
    if name == "createpolicy":  # a hint to the cache
        return convert.build_move(ops, PtxInstruction("mov.b64", (instruction.operands[0], "0")))
    builder = _BUILDERS.get(name)
    if builder is None:
        raise NotInterpreted(f"{instruction.opcode} is not interpreted.")
    return builder(ops, instruction)
