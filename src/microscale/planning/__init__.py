"""Which implementation runs each op, and why. Imports no torch: a server process that has none reads the limit."""

from microscale.kernels.numbers import MAX_TOP_LOGPROBS

__all__ = ["MAX_TOP_LOGPROBS"]
