"""Instructions that are spelled out, in the interpreter; what is refused, and what stays as it is."""

from __future__ import annotations

import numpy as np
import pytest

from cases_translate import (  # noqa: F401
    test_a_nan_code_reaches_its_row_or_column_alone,
    test_a_predicate_holds_for_all_that_is_spelled_out,
    test_a_wrong_nvfp4_scale_shows,
    test_bf16_in_float32_sums,
    test_block_scaled_mma,
    test_comparisons_and_packed_integers,
    test_every_fp8_byte_becomes_its_f16,
    test_every_nvfp4_scale,
    test_every_scale_byte,
    test_extremes_of_three,
    test_f16_in_float32_sums,
    test_float32_to_e4m3,
    test_fp8_mma,
    test_nvfp4_mma,
    test_pairs_of_float32,
    test_stmatrix,
    test_sums_and_products_of_bf16,
    translated_for,
)
from ptx_kernels import Words, run_warp, scaled_mma, warp_kernel
from ptxproof.errors import NotInterpreted, Unsupported
from ptxproof.instructions import FORMS, NVFP4_MMA
from ptxproof.ptx import parse
from ptxproof.translation import SPELLINGS, translate


class Interpreted:
    sum_error = 2.0**-22

    def both(self, body: str, words: Words, num_out: int, sm: int) -> list[Words]:
        kernels = translated_for(sm, body, words.shape[1], num_out)
        return [run_warp(ptx, words, num_out) for ptx in kernels]


@pytest.fixture
def ways() -> Interpreted:
    return Interpreted()


def test_every_form_is_spelled_out_or_refused_by_name() -> None:
    refused = {form.name for form in FORMS} - set(SPELLINGS)
    assert refused == {
        "bulk copies and their barriers", "clusters", "wgmma", "tensor memory", "E2M1, E3M2 and E2M3", "E8M0",
        "256-bit loads and stores", "reduction of float32 over a warp",
    }  # fmt: skip
    ptx = warp_kernel("tcgen05.wait::ld.sync.aligned; mov.b32 %o0, %i0;", 1, 1)
    with pytest.raises(Unsupported, match=r"tcgen05.* \(tensor memory\) cannot be spelled out for SM 9\.0"):
        translate(ptx, 90)


@pytest.mark.parametrize(
    "body",
    [
        scaled_mma(NVFP4_MMA, byte_a=1),
        scaled_mma(NVFP4_MMA, byte_b=2),
        scaled_mma(NVFP4_MMA.replace("ue4m3", "ue8m0")),
        scaled_mma(NVFP4_MMA.replace("4X", "2X").replace("ue4m3", "ue8m0")),
        scaled_mma(NVFP4_MMA.replace("mxf4nvf4", "mxf4").replace("4X", "2X").replace("ue4m3", "ue8m0")),
        scaled_mma(NVFP4_MMA.replace("f32.e2m1.e2m1.f32.ue4m3", "f32.e4m3.e4m3.f32.ue4m3")),
    ],
)
def test_other_block_scaled_products_are_refused(body: str) -> None:
    ptx = warp_kernel(body, 12, 4)
    with pytest.raises(Unsupported, match=r"mma\.sync.*cannot be spelled out for SM 9\.0"):
        translate(ptx, 90)
    with pytest.raises(NotInterpreted, match=r"mma\.sync"):
        run_warp(ptx, np.zeros((32, 12), np.uint32), 4)


def test_what_the_target_has_stays() -> None:
    ptx = warp_kernel("add.rn.f32x2 %d0, %d1, %d2; mov.b32 %o0, %i0;", 1, 1)
    kept = translate(ptx, 120)
    assert not kept.spelled
    assert kept.ptx == ptx.replace(".target sm_121a", ".target sm_120a")
    assert ".version 8.5" in translate(ptx, 90, (8, 5)).ptx
    assert ".version 8.7" in translate(ptx, 120, (8, 5)).ptx  # the first that knows the target
    assert ".version 8.8" in translate(ptx, 121).ptx


def test_instructions_are_read_with_guards_vectors_and_comments() -> None:
    read = parse("@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1 + 16];  ".strip())
    assert (read.guard, read.opcode, read.operands) == ("!%p1", "ld.global.v2.b32", ("{%r1, %r2}", "[%rd1 + 16]"))
