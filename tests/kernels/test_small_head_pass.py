"""What a draft head's pass has beside its layer: interpreted, and executed as cards that are not here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from microscale.hardware import known
from microscale.kernels.small.reference import likeliest
from microscale_lab.cases.head_passes import KINDS, blocks_of, cases
from microscale_lab.prove.execute import execute
from microscale_lab.prove.executed_report import rows_of
from microscale_lab.prove.selection import CPU, select
from support.interpreter import first_and_all, run_cases


@first_and_all
def test_under_the_interpreter(which: str) -> None:
    run_cases("cases_small_head_pass.py", which, beside=__file__)


@pytest.mark.parametrize("card", ["a100", "h200", "gb10"])
def test_executed_as_a_card(card: str, tmp_path: Path) -> None:
    few = [case for case in cases() if any(name in case.name for name in ("3 tokens, 300", "5000", "NaN", "zeros"))]
    selected = select([known(card)], few, CPU)
    rows = rows_of(execute(selected, device=CPU, jobs=1, cache_dir=tmp_path), CPU)
    assert {row.variant for row in rows} == {"triton_small, norm_pair", "triton_small, likeliest"}
    assert [row.reason for row in rows if not row.ok] == []
    assert sum(row.cases for row in rows) == len(few)


@pytest.mark.parametrize("kind", KINDS)
def test_the_likeliest_of_blocks_is_the_likeliest_of_all(kind: str) -> None:
    values = blocks_of(kind, 3, 96)
    blocks = values.view(3, 6, 16)
    rows = blocks.argmax(-1) + 16 * torch.arange(6)
    out = torch.empty(3, dtype=torch.int64)
    likeliest(blocks.amax(-1), rows.int(), None, out)
    assert out.tolist() == values.argmax(-1).tolist()
