"""The interpreter against the GPU at hand: instruction by instruction, and whole kernels of SM 9.0 and 8.0.

Bit for bit where neither a matrix instruction nor an approximation runs; else within what the PTX manual allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cases_instructions import ALL, One, agree
from gpu_ptx import run_on_gpu
from kernels import cases_dense
from microscale.hardware import Gpu, known, present
from microscale.hardware.tiles.gemm import possible
from microscale.kernels.dense import unpack
from microscale.kernels.dense.packed import pack
from microscale.kernels.moe import grouped, routing
from microscale_lab.cases.errors import errors, rms_step
from microscale_lab.cases.experts import ExpertsInput, ExpertsProblem
from microscale_lab.prove.bridge import as_card, interpreted
from ptx_kernels import run_warp, warp_kernel
from ptxproof.instructions import target_name

pytestmark = [pytest.mark.odd_shapes, pytest.mark.own("the interpreter is held against the GPU as it is")]
NOT_EXACT = re.compile(r"\b(mma\.sync|wgmma|\w+\.approx|div\.full)")


@pytest.mark.parametrize("one", ALL, ids=str)
def test_instructions(one: One) -> None:
    here = present().sm
    if one.since > here:
        pytest.skip(f"SM {here} does not have it")
    words = one.make()
    ptx = warp_kernel(one.body, words.shape[1], one.outputs, target_name(here))
    on_gpu = run_on_gpu(ptx, words, one.outputs)
    with np.errstate(all="ignore"):
        ours = run_warp(ptx, words, one.outputs)
    different = np.argwhere(ours != on_gpu)
    shown = [(lane, at, hex(ours[lane, at]), hex(on_gpu[lane, at])) for lane, at in different[:4]]
    print(f"{one}: {len(different)} of {ours.size} words differ")
    assert agree(one, on_gpu, ours), f"lane, result, interpreter, GPU: {shown}"


def moved(value: Any, device: str) -> Any:
    """A tensor, or a record of tensors, elsewhere."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: moved(getattr(value, field.name), device) for field in fields(value)})


def on_both(gpu: Gpu, run: Callable[[str], tuple[Tensor, ...]]) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Results on the GPU and in the interpreter, and the PTX that ran."""
    seen: list[str] = []
    with as_card(gpu) as executed:
        theirs = [result.cpu() for result in run("cuda")]
    assert executed.kernels
    with interpreted(gpu.sm, lambda kernel, ptx: seen.append(ptx) or ptx):  # type: ignore[func-returns-value]
        ours = list(run("cpu"))
    return ours, theirs, seen


CARDS = [pytest.param(known(name), id=name) for name in ("a100", "h200")]


@pytest.mark.parametrize("gpu", CARDS)
@pytest.mark.parametrize("fmt", ["fp8", "mxfp8", "mxfp4"])
def test_unpacked_weights_to_the_bit(fmt: str, gpu: Gpu) -> None:
    packed = pack(cases_dense.make_weights(fmt, 48, 96))

    def run(device: str) -> tuple[Tensor, ...]:
        return (unpack.unpack(moved(packed, device)),)

    ours, theirs, seen = on_both(gpu, run)
    assert not [found[0] for ptx in seen if (found := NOT_EXACT.search(ptx))]
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("gpu", CARDS)
def test_dispatch_to_the_bit(gpu: Gpu) -> None:
    # A token's experts differ: pairs that occur twice would leave places of the order unwritten.
    experts = torch.rand(70, 9, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :3].int()

    def run(device: str) -> tuple[Tensor, ...]:
        found = routing.dispatch(experts.to(device), 9, 16)
        return found.offsets, found.order, found.tiles

    ours, theirs, seen = on_both(gpu, run)
    assert not [found[0] for ptx in seen if (found := NOT_EXACT.search(ptx))]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_matrix_products_within_a_rounding() -> None:
    """Experts of SM 8.0: sums in another order and with other roundings, and then rounded to bf16 three times."""
    gpu = known("a100")
    case = ExpertsInput("both", 20, hidden=352, intermediate=160)
    tile = next(iter(possible(grouped.gemm_path(4, False, False), gpu)))
    problem = ExpertsProblem.of(case, "mxfp4", "cpu")

    def run(device: str) -> tuple[Tensor, ...]:
        given = moved(problem, device)
        return (grouped.run(given.packed, case.gate, given.x, given.routing, gpu, tile=tile),)

    (ours,), (theirs,), seen = on_both(gpu, run)
    assert any("mma.sync" in ptx for ptx in seen)
    assert errors(theirs, ours.float()).rms < 3 * rms_step("bf16")
