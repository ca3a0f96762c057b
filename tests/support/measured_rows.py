"""Rows of the H200 that are shipped."""

from __future__ import annotations

from microscale.hardware import KNOWN, speeds


def measured_us(case: str, op: str = "moe", implementation: str = "triton_w4a16") -> float:
    """What one case took."""
    family = KNOWN["h200"].family
    rows = speeds.read(speeds.MEASURED_DIR / f"{family.name}.json", family).rows
    (found,) = (row.us for row in rows if (row.op, row.implementation, row.case) == (op, implementation, case))
    return found
