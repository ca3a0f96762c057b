"""Proves and executes Triton kernels for GPUs that are not there.

``prove`` compiles a launch for an SM and checks it against the limits. ``interpret`` compiles it and executes the PTX
on a CPU, with checks that hardware does not make. ``translate`` and ``as_card`` run PTX of one SM on a GPU of another.
"""

from ptxproof.compiler import Facts, compile_kernel, compile_to_ptx
from ptxproof.errors import BadPtx, InterpretError, NotInterpreted, ProofError, Race, Unsupported
from ptxproof.gate import Proof, find_faults, prove
from ptxproof.interpreter.dependent import Chain
from ptxproof.interpreter.launched import Edit, interpret, interpret_ptx
from ptxproof.launch import TritonKernel, TritonLaunch
from ptxproof.play import Card, CardRun, as_card, present_card
from ptxproof.targets import PROVED_SMS, SmTarget, target
from ptxproof.translation import Translated, translate

__all__ = [
    "PROVED_SMS",
    "BadPtx",
    "Card",
    "CardRun",
    "Chain",
    "Edit",
    "Facts",
    "InterpretError",
    "NotInterpreted",
    "Proof",
    "ProofError",
    "Race",
    "SmTarget",
    "Translated",
    "TritonKernel",
    "TritonLaunch",
    "Unsupported",
    "as_card",
    "compile_kernel",
    "compile_to_ptx",
    "find_faults",
    "interpret",
    "interpret_ptx",
    "present_card",
    "prove",
    "target",
    "translate",
]
