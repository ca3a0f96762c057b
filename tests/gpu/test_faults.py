"""Faults that are put into GB10's kernels before they run on the GPU at hand: the numbers must show each of them.

Missing barriers and waits are the interpreter's to find (``tests/prove/test_faults.py``): on a GPU they may go unseen.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from kernels import cases_attention, cases_dense
from microscale.hardware import Gpu, known
from microscale.hardware.tiles.gemm import GemmPath, possible
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import attention
from microscale.kernels.dense import gemm
from microscale.kernels.dense.packed import pack
from microscale.kernels.moe import grouped, small_batch
from microscale.kernels.moe.spec import MoeSpec
from microscale.kernels.op import Activations
from microscale_lab.calls import run_attention
from microscale_lab.cases.errors import errors, rms_step
from microscale_lab.cases.experts import ExpertsInput, ExpertsProblem
from microscale_lab.prove.bridge import as_card
from support.ptx_faults import (
    Run,
    Seeded,
    always_visible,
    mask_left_out,
    nibbles_swapped,
    of_another_lane,
    only_in,
    tile_left_out,
)

pytestmark = [
    pytest.mark.odd_shapes,
    pytest.mark.timeout(600),
    pytest.mark.own("plays GB10 by itself, whatever the session plays"),
]
GPU = known("gb10")
FAR_OVER = 15 * rms_step("bf16")
"""Five times what the tests of these kernels allow."""
HIDDEN, INTERMEDIATE = 352, 160
"""Widths with tails: no multiple of a tile of K."""


@cache
def problem(tokens: int) -> ExpertsProblem:
    return ExpertsProblem.of(ExpertsInput("faulty", tokens, hidden=HIDDEN, intermediate=INTERMEDIATE), "mxfp4", "cuda")


def _grouped(given: ExpertsProblem, gpu: Gpu, scaled: bool) -> Tensor:
    tile = next(iter(possible(grouped.gemm_path(4, scaled, False), gpu)))
    return grouped.run(given.packed, given.layer.gate, given.x, given.routing, gpu, block_scaled=scaled, tile=tile)


def grouped_experts(gpu: Gpu) -> tuple[Tensor, Tensor]:
    return _grouped(problem(20), gpu, False), problem(20).expected()


def block_scaled(gpu: Gpu) -> tuple[Tensor, Tensor]:
    return _grouped(problem(20), gpu, True), problem(20).expected_quantised()


def beside_a_broken_token(gpu: Gpu) -> tuple[Tensor, Tensor]:
    """Every second token is NaN, and so is what follows the last: a load that passes the end of a row meets it."""
    x = problem(20).x
    room = torch.full((128, x.shape[1]), math.nan, dtype=x.dtype, device=x.device)
    room[:20:2] = x[::2]
    return _grouped(replace(problem(20), x=room[:20]), gpu, False)[::2], problem(20).expected()[::2]


def few_tokens(gpu: Gpu) -> tuple[Tensor, Tensor]:
    given = problem(5)
    case = given.layer
    sizes = (case.num_experts, case.top_k, case.hidden, case.intermediate)
    spec = MoeSpec(*sizes, "mxfp4", Activations.BF16, case.gate, case.bias, case.tokens)
    return small_batch.run_list(given.packed, spec, gpu, given.x, given.routing), given.expected()


def dense(gpu: Gpu) -> tuple[Tensor, Tensor]:
    given = cases_dense.make_problem("mxfp4", 20, 144, HIDDEN)
    tile = next(iter(possible(GemmPath.W4A16, gpu)))
    y = gemm.run(pack(given.weights), gpu, given.x, given.residual, block_scaled=False, tile=tile)
    return y, given.expected


def prompt(gpu: Gpu) -> tuple[Tensor, Tensor]:
    spec, q, kv, batch = cases_attention.make_case(8, 1, 64, None, 16, [(0, 37)], False)
    return run_attention(PagedAttention(), spec, gpu, q, kv, batch, None), attention(q, kv, batch, spec, None)


SEEDED = [
    Seeded("scales of another row", grouped_experts, "gate_up", of_another_lane("scales_ptr", 4)),
    Seeded("scales of another row", few_tokens, "down_small", of_another_lane("s_ptr", 4)),
    Seeded("nibbles swapped", grouped_experts, "gate_up", nibbles_swapped("words_ptr")),
    Seeded("nibbles swapped", block_scaled, "down", nibbles_swapped("words_ptr")),
    Seeded("nibbles swapped", dense, "gemm", nibbles_swapped("words_ptr")),
    Seeded("one K tile too few", grouped_experts, "gate_up", tile_left_out),
    Seeded("one K tile too few", block_scaled, "gate_up", tile_left_out),
    Seeded("one K tile too few", dense, "gemm", tile_left_out),
    Seeded("a tail that is not masked", beside_a_broken_token, "gate_up", mask_left_out("x_ptr")),
    Seeded("a tail that is not masked", prompt, "attend_long", always_visible),
]


def rms(run: Run) -> float:
    found, wanted = run(GPU)
    return errors(found, wanted).rms


@pytest.mark.parametrize("run", dict.fromkeys(seeded.run for seeded in SEEDED))
def test_without_a_fault_all_is_well(run: Run) -> None:
    with as_card(GPU):
        assert rms(run) < 4 * rms_step("bf16")


@pytest.mark.parametrize("seeded", SEEDED, ids=str)
def test_wrong_numbers_show(seeded: Seeded) -> None:
    done: list[str] = []

    def edit(kernel: object, ptx: str) -> str:
        spoiled = only_in(seeded.function, seeded.fault)(kernel, ptx)  # type: ignore[arg-type]
        done.extend([seeded.function] if spoiled != ptx else [])
        return spoiled

    with as_card(GPU, edit):
        found = rms(seeded.run)
    assert done
    assert math.isnan(found) or found > FAR_OVER
