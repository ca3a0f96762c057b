"""Faults in the source of a kernel: which there are, and that compiled they are what they say."""

from __future__ import annotations

import ast
from contextlib import nullcontext
from pathlib import Path
from types import FunctionType
from typing import cast

import pytest
import torch

from mutable_kernels import half, halved_rows
from ptxproof import InterpretError, TritonLaunch, compile_to_ptx, interpret
from ptxproof.mutate import (
    DROPPED_WAIT,
    HOST_OPERATORS,
    OPERATORS,
    HostFunction,
    Mutant,
    apply,
    callees,
    mutants,
    without_lines,
)

ORIGINAL = halved_rows.src
FOUND = list(mutants(halved_rows))


def launch(x: torch.Tensor, y: torch.Tensor) -> TritonLaunch:
    return TritonLaunch.of(halved_rows, (len(x),), x, y, x.shape[1], WIDE=False, BLOCK=32, num_warps=1)


def test_every_operator_finds_something_and_no_fault_comes_twice() -> None:
    # The kernel waits for nothing.
    assert {mutant.operator for mutant in FOUND} == {*OPERATORS} - {DROPPED_WAIT}
    assert len({mutant.source for mutant in FOUND}) == len({mutant.key for mutant in FOUND}) == len(FOUND)
    assert ast.unparse(ast.parse(ORIGINAL)) not in {mutant.source for mutant in FOUND}
    assert halved_rows.src == ORIGINAL
    lines = Path(halved_rows.fn.__code__.co_filename).read_text().splitlines()
    for mutant in FOUND:
        assert mutant.before.split("(")[0].split(" ")[0] in lines[mutant.line - 1]


def test_what_a_kernel_calls_is_found() -> None:
    ours = {fn for fn in callees(halved_rows) if fn.__module__ == halved_rows.__module__}
    assert ours == {halved_rows, half}


def fault(operator: str, after: str) -> Mutant:
    (found,) = (mutant for mutant in FOUND if (mutant.operator, mutant.after) == (operator, after))
    return found


NOTICED = [
    ("comparison", "at <= width"),
    ("off by one", "range((width + BLOCK - 1) // BLOCK - 1)"),
    ("dropped mask", "tl.load(x_ptr + row * width + at)"),
    ("neighbouring index", "tl.store(y_ptr + row + 1, tl.sum(total, axis=0).to(tl.bfloat16))"),
    ("truncation", "tl.sum(total, axis=0).to(tl.bfloat16, fp_downcast_rounding='rtz')"),
    ("constant 0 or 1", "row"),
]


@pytest.mark.parametrize(("operator", "after"), NOTICED)
def test_a_fault_is_compiled_and_shows(operator: str, after: str) -> None:
    x = torch.rand(3, 41, generator=torch.Generator().manual_seed(0))
    want = (x.sum(1) / 2).bfloat16()
    y = torch.zeros(3, dtype=torch.bfloat16)
    interpret(launch(x, y), 121)
    assert torch.equal(y, want)
    apply(halved_rows, fault(operator, after).source)
    outside = pytest.raises(InterpretError, match="outside of its tensor")
    with outside if operator in ("comparison", "dropped mask", "neighbouring index") else nullcontext():
        try:
            interpret(launch(x, y), 121, to_ptx=compile_to_ptx)
        finally:
            apply(halved_rows, ORIGINAL)
        assert not torch.equal(y, want)


def test_ptx_without_lines_tells_whether_a_fault_changes_anything() -> None:
    x, y = torch.zeros(3, 41), torch.zeros(3, dtype=torch.bfloat16)
    kernel = launch(x, y).kernel()
    inside = fault("comparison", "at <= width")
    unreached = next(mutant for mutant in FOUND if mutant.before == "total + 1")
    try:
        texts = []
        for source in (ORIGINAL, ast.unparse(ast.parse(ORIGINAL)), unreached.source, unreached.probe, inside.source):
            apply(halved_rows, source)
            texts.append(without_lines(compile_to_ptx(kernel, 121)[0]))
        assert texts[0] == texts[1] == texts[2] == texts[3] != texts[4]
        apply(halved_rows, inside.probe)
        with pytest.raises(Exception, match="ptxproof_probe"):
            compile_to_ptx(kernel, 121)
    finally:
        apply(halved_rows, ORIGINAL)


def rows_of_tiles(rows: int, tile: int) -> int:
    """Code of Python that a launch asks."""
    return (rows + tile - 1) // tile


def test_a_function_of_python_is_changed_wherever_it_is_called() -> None:
    host, called = HostFunction(cast(FunctionType, rows_of_tiles)), rows_of_tiles
    found = {mutant.after: mutant for mutant in mutants(host)}
    assert {mutant.operator for mutant in found.values()} <= {*HOST_OPERATORS}
    host.apply(found["rows + tile"].source)
    assert (called(8, 8), rows_of_tiles(8, 8)) == (2, 2)
    host.apply(host.src)
    assert rows_of_tiles(8, 8) == 1
