"""The table of one layer in several formats."""

from __future__ import annotations

from microscale_lab.kernel_bench.formats import side_by_side
from microscale_lab.kernel_bench.rows import row
from microscale_lab.kernel_bench.timing import Ceilings


def test_formats_stand_next_to_each_other() -> None:
    ceilings = Ceilings(4000.0, 700.0)
    cases = [("256-experts mxfp4, 8 tokens", 40e6), ("256-experts nvfp4, 8 tokens", 44e6), ("qkv mxfp4, 1 tokens", 8e6)]
    cases.append(("qkv nvfp4, 1 tokens", 9e6))
    rows = [row("moe", case, "triton", 20.0, num_bytes, 1e6, ceilings, 1e-3) for case, num_bytes in cases]
    head, experts, qkv = side_by_side(rows).splitlines()
    assert head.split() == ["case", "mxfp4", "us", "floor", "nvfp4", "us", "floor", "error"]
    assert experts.split() == ["256-experts,", "8", "tokens", "20.0", "50%", "20.0", "55%", "1.0e-03"]
    assert qkv.startswith("qkv, 1 tokens")
