"""All tables in one."""

from __future__ import annotations

from functools import cache

from microscale_lab.cases import (
    attention,
    dense,
    dense_from_sum,
    drafts,
    fused_attention,
    head_passes,
    moe,
    routing,
    sampling,
    small,
)
from microscale_lab.cases.case import KernelCase

TABLES = (moe, routing, dense, dense_from_sum, attention, fused_attention, small, head_passes, sampling, drafts)


@cache
def all_cases() -> tuple[KernelCase, ...]:
    """Every case of every op; ``KernelCase.refuses`` says which of them a card has."""
    return tuple(case for table in TABLES for case in table.cases())
