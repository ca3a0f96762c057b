"""Case tables of every op: what is run, the float32 reference, and how far apart they may be.

``prove --run`` executes them for cards that are not here, on a GPU or on a CPU that interprets PTX; the kernel tests
import the same tables. ``case`` defines a case, ``errors`` has the norms and the formats' steps; each op has a module
with the inputs, the table and the bounds. The oracle decides which path runs a case on a card.
"""

from functools import cache

from microscale_lab.cases import (
    attention,
    dense,
    dense_from_sum,
    drafts,
    fused_attention,
    head_passes,
    moe,
    recurrent,
    routing,
    sampling,
    small,
)
from microscale_lab.cases.case import Compared, KernelCase

__all__ = ["Compared", "KernelCase", "all_cases"]

_TABLES = (
    moe,
    routing,
    dense,
    dense_from_sum,
    attention,
    fused_attention,
    small,
    head_passes,
    recurrent,
    sampling,
    drafts,
)


@cache
def all_cases() -> tuple[KernelCase, ...]:
    """Every case of every op. ``KernelCase.refuses`` says which of them a card has."""
    return tuple(case for table in _TABLES for case in table.cases())
