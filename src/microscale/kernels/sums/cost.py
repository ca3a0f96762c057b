"""Bytes that a sum over ranks must move: what one rank sends over the link, and what it reads and writes itself."""

from __future__ import annotations

from microscale.kernels.sums.spec import SumSpec


def sent_bytes(spec: SumSpec) -> int:
    """To the other ranks: all of it to each."""
    return (spec.world - 1) * spec.rows * spec.row_bytes


def sum_rows(spec: SumSpec) -> int:
    """In the rank's own memory: the part in, its own slot and the others' written, all of them read, the sum out."""
    return (2 * spec.world + 2) * spec.rows * spec.row_bytes


def sum_add_norm(spec: SumSpec) -> int:
    """As ``sum_rows``, with the residual stream in, the norm out, and the weight."""
    return sum_rows(spec) + (2 * spec.rows + 1) * spec.row_bytes
