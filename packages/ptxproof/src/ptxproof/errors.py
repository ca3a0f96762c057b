"""Every error that ptxproof raises on purpose. Each message is one sentence that says what is wrong and where."""

from __future__ import annotations


class ProofError(Exception):
    """The base class of all others."""


class Unsupported(ProofError):
    """The GPU, or this package, cannot do what was asked."""


class BadPtx(ProofError):
    """Text that is not the PTX of one kernel as Triton writes it."""


class InterpretError(ProofError):
    """The kernel did something that no kernel may do: an access out of bounds, an undefined register, a deadlock."""


class Race(InterpretError):
    """Two threads access the same memory and nothing orders them."""


class NotInterpreted(InterpretError):
    """The interpreter does not know an instruction of the kernel."""
