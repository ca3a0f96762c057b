"""What is wrong with a kernel, or with our reading of it."""

from __future__ import annotations

from microscale.errors import MicroscaleError


class InterpretError(MicroscaleError):
    """The kernel did what no kernel may do, and where: an access out of bounds, an undefined register, a deadlock."""


class Race(InterpretError):
    """Two threads touch the same shared memory and nothing orders them."""


class NotInterpreted(InterpretError):
    """An instruction that the interpreter does not know."""
