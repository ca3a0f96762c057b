"""The GPU suite takes the tests of a case table by name: whoever adds one to the table must not forget it there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ELSEWHERE = {
    "test_capped_logits": "test_dense.py: test_capped_logits_have_the_blocks_of_what_they_are",
    "test_gemm_with_mxfp8_activations": "test_dense.py: test_mxfp8_activations",
    "test_what_does_not_fit_is_refused": "starts nothing",
}
"""Tests that the GPU suite has in another form, and where."""


def imported(table: str) -> Iterator[str]:
    for path in (TESTS / "gpu").glob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module == f"kernels.{table}":
                yield from (name.name for name in node.names if name.name.startswith("test_"))


@pytest.mark.parametrize("table", [path.stem for path in sorted((TESTS / "kernels").glob("cases_*.py"))])
def test_every_test_of_a_table_runs_on_a_gpu(table: str) -> None:
    there = set(imported(table))
    if not there:
        pytest.skip("the GPU suite has tests of its own for this one")
    body = ast.parse((TESTS / "kernels" / f"{table}.py").read_text()).body
    written = {node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    assert written - there - set(ELSEWHERE) == set()
