"""Faults that are put into the PTX of our kernels. Wrong numbers must show in the result, far over what rounding
explains; a missing barrier or wait must be noticed by the checks, whatever the numbers are."""

from __future__ import annotations

import math

import pytest
from torch import Tensor

from kernels import cases_attention, cases_dense
from lab.prove.test_interpret import expected_nvfp4, problem, run_grouped, run_small_batch
from microscale.hardware import known
from microscale.hardware.tiles.gemm import GemmPath, possible
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import attention
from microscale.kernels.dense import gemm
from microscale.kernels.dense.packed import pack
from microscale_lab.calls import run_attention
from microscale_lab.cases.errors import errors, rms_step
from ptxproof.errors import InterpretError
from support.interpreted import Edit, interpreted
from support.ptx_faults import (
    Seeded,
    always_visible,
    barrier_before_count_removed,
    bytes_swapped,
    mask_left_out,
    nibbles_swapped,
    of_another_lane,
    only_in,
    relaxed,
    removed,
    tile_left_out,
)

pytestmark = pytest.mark.timeout(600)
GPU = known("gb10")
CHECKS = (
    "with no barrier between", "a cp.async is still writing", "outside of its tensor", "store different numbers",
    "never written", "nothing has waited for that launch", "nothing orders the two",
)  # fmt: skip
FAR_OVER = 15 * rms_step("bf16")
"""Five times what the tests of these kernels allow."""


def grouped(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_grouped(GPU, "mxfp4", False, edit), problem(20, "mxfp4")[1].expected()


def block_scaled(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_grouped(GPU, "mxfp4", True, edit), problem(20, "mxfp4")[1].expected_quantised()


def one_token(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_small_batch(GPU, "mxfp4", 1, edit), problem(1, "mxfp4")[1].expected()


def small_batch(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_small_batch(GPU, "mxfp4", 5, edit), problem(5, "mxfp4")[1].expected()


def dense(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return _gemm("mxfp4", GemmPath.W4A16, edit)


def _gemm(fmt: str, path: GemmPath, edit: Edit | None) -> tuple[Tensor, Tensor]:
    given = cases_dense.make_problem(fmt, 20, 144, 352)
    tile = next(iter(possible(path, GPU)))
    with interpreted(GPU.sm, edit):
        y = gemm.run(pack(given.weights), GPU, given.x, given.residual, block_scaled=False, tile=tile)
    return y, given.expected


def grouped_nvfp4(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_grouped(GPU, "nvfp4", False, edit), problem(20, "nvfp4")[1].expected()


def block_scaled_nvfp4(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_grouped(GPU, "nvfp4", True, edit), expected_nvfp4(problem(20, "nvfp4")[1])


def one_token_nvfp4(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_small_batch(GPU, "nvfp4", 1, edit), problem(1, "nvfp4")[1].expected()


def dense_nvfp4(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return _gemm("nvfp4", GemmPath.W4A16, edit)


def grouped_fp8_block(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_grouped(GPU, "fp8_block", False, edit), problem(20, "fp8_block")[1].expected()


def few_fp8_block(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return run_small_batch(GPU, "fp8_block", 5, edit), problem(5, "fp8_block")[1].expected()


def dense_fp8_block(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return _gemm("fp8_block", GemmPath.W8A16, edit)


def _attention(sequences: list[tuple[int, int]], fp8: bool, edit: Edit | None) -> tuple[Tensor, Tensor]:
    spec, q, kv, batch = cases_attention.make_case(8, 1, 64, None, 16, sequences, fp8)
    with interpreted(GPU.sm, edit):
        y = run_attention(PagedAttention(), spec, GPU, q, kv, batch, None)
    return y, attention(q, kv, batch, spec, None)


def decode(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return _attention([(300, 1), (17, 1)], False, edit)


def decode_fp8(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return _attention([(300, 1), (17, 1)], True, edit)


def split_decode(edit: Edit | None) -> tuple[Tensor, Tensor]:
    """Its last program adds up the splits."""
    return _attention([(1100, 1)], False, edit)


def prefill(edit: Edit | None) -> tuple[Tensor, Tensor]:
    return _attention([(0, 37)], False, edit)


def shows(seeded: Seeded) -> str | None:
    """What a fault is known by: the numbers, or what the checks say; ``None``: it is not noticed."""
    try:
        found, wanted = seeded.run(only_in(seeded.function, seeded.fault))
    except InterpretError as error:
        return next(said for said in CHECKS if said in str(error))
    rms = errors(found, wanted).rms
    return "numbers" if math.isnan(rms) or rms > FAR_OVER else None


WRONG_NUMBERS = [
    Seeded("scales of another row", grouped, "gate_up", of_another_lane("scales_ptr", 4)),
    Seeded("scales of another row", grouped, "down", of_another_lane("scales_ptr", 4)),
    Seeded("scales of another row", one_token, "gate_up_small", of_another_lane("s_ptr", 4)),
    Seeded("scales of another row", small_batch, "down_small", of_another_lane("s_ptr", 4)),
    Seeded("scales of another row", dense, "gemm", of_another_lane("scales_ptr", 4)),
    Seeded("nibbles swapped", grouped, "gate_up", nibbles_swapped("words_ptr")),
    Seeded("nibbles swapped", block_scaled, "down", nibbles_swapped("words_ptr")),
    Seeded("nibbles swapped", one_token, "down_direct", nibbles_swapped("w_ptr")),
    Seeded("nibbles swapped", small_batch, "gate_up_small", nibbles_swapped("w_ptr")),
    Seeded("nibbles swapped", dense, "gemm", nibbles_swapped("words_ptr")),
    Seeded("two codes swapped", decode_fp8, "attend_short", bytes_swapped("v_ptr")),
    Seeded("one K tile too few", grouped, "gate_up", tile_left_out),
    Seeded("one K tile too few", block_scaled, "gate_up", tile_left_out),
    Seeded("one K tile too few", one_token, "gate_up_small", tile_left_out),
    Seeded("one K tile too few", small_batch, "down_small", tile_left_out),
    Seeded("one K tile too few", dense, "gemm", tile_left_out),
    Seeded("scales of another row", grouped_nvfp4, "gate_up", of_another_lane("scales_ptr", 4)),
    Seeded("scales of other columns", one_token_nvfp4, "gate_up_small", of_another_lane("s_ptr", 2)),
    Seeded("scales of another row", dense_nvfp4, "gemm", of_another_lane("scales_ptr", 4)),
    Seeded("nibbles swapped", grouped_nvfp4, "down", nibbles_swapped("words_ptr")),
    Seeded("nibbles swapped", one_token_nvfp4, "down_direct", nibbles_swapped("w_ptr")),
    Seeded("one K tile too few", grouped_nvfp4, "gate_up", tile_left_out),
    Seeded("scales of another row", block_scaled_nvfp4, "gate_up", of_another_lane("scales_ptr", 4)),
    Seeded("scales of another token", block_scaled_nvfp4, "down", of_another_lane("hs_ptr", 4)),
    Seeded("nibbles swapped", block_scaled_nvfp4, "down", nibbles_swapped("words_ptr")),
    Seeded("one K tile too few", block_scaled_nvfp4, "gate_up", tile_left_out),
    Seeded("one K tile too few", dense_nvfp4, "gemm", tile_left_out),
    Seeded("scales of another row", grouped_fp8_block, "gate_up", of_another_lane("scales_ptr", 4)),
    Seeded("scales of another row", dense_fp8_block, "gemm", of_another_lane("scales_ptr", 4)),
    Seeded("one K tile too few", few_fp8_block, "gate_up_small", tile_left_out),
    Seeded("one tile of keys too few", decode, "attend_short", tile_left_out),
    Seeded("one tile of keys too few", prefill, "attend_long", tile_left_out),
    Seeded("a tail that is not masked", decode, "attend_short", always_visible),
    Seeded("a tail that is not masked", prefill, "attend_long", always_visible),
]


@pytest.mark.parametrize("seeded", WRONG_NUMBERS, ids=str)
def test_wrong_numbers_show(seeded: Seeded) -> None:
    assert shows(seeded) == "numbers"


MASKS = [
    Seeded("a tail that is not masked", grouped, "gate_up", mask_left_out("x_ptr")),
    Seeded("a tail that is not masked", dense, "gemm", mask_left_out("x_ptr")),
]


@pytest.mark.parametrize("seeded", MASKS, ids=str)
def test_a_tail_that_is_not_masked_shows_in_the_numbers_or_leaves_the_tensor(seeded: Seeded) -> None:
    assert shows(seeded) in ("numbers", "outside of its tensor")


BARRIER, WAIT = r"bar\.sync", r"cp\.async\.wait_group"
UNORDERED = [
    Seeded("no barrier", grouped, "gate_up", removed(BARRIER, 4)),
    Seeded("no barrier", one_token, "down_direct", removed(BARRIER)),
    Seeded("no barrier", dense, "gemm", removed(BARRIER, 2)),
    Seeded("no barrier", decode, "attend_short", removed(BARRIER, 4)),
    Seeded("no barrier", prefill, "attend_long", removed(BARRIER, 5)),
    Seeded("no wait for a copy", grouped, "gate_up", removed(WAIT)),
    Seeded("no wait for a copy", block_scaled, "down", removed(WAIT)),
    Seeded("no wait for a copy", block_scaled_nvfp4, "gate_up", removed(WAIT)),
    Seeded("no wait for a copy", dense, "gemm", removed(WAIT)),
    Seeded("no wait for a copy", decode, "attend_short", removed(WAIT, 1)),
    Seeded("no wait for a copy", prefill, "attend_long", removed(WAIT)),
    Seeded("no wait for the launch before", one_token, "down_direct", removed(r"griddepcontrol\.wait")),
    Seeded("no barrier before the count", split_decode, "attend_short", barrier_before_count_removed),
    Seeded("a count that orders nothing", split_decode, "attend_short", relaxed),
]


@pytest.mark.parametrize("seeded", UNORDERED, ids=str)
def test_what_nothing_orders_is_noticed(seeded: Seeded) -> None:
    """The interpreter runs in lockstep, so that numbers would come out right in most of these."""
    noticed = (
        "with no barrier between", "a cp.async is still writing", "nothing has waited for that launch",
        "nothing orders the two",
    )  # fmt: skip
    assert shows(seeded) in noticed
