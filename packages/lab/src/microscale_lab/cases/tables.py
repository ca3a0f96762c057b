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
from microscale_lab.cases.case import Case

TABLES = (moe, routing, dense, dense_from_sum, attention, fused_attention, small, head_passes, sampling, drafts)


@cache
def all_cases() -> tuple[Case, ...]:
    """Every case of every op; ``Case.refuses`` says which of them a card has."""
    return tuple(case for table in TABLES for case in table.cases())
