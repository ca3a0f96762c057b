"""Instructions that are spelled out, executed on the GPU at hand: for itself, and for older ones whose code it runs."""

from __future__ import annotations

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
from gpu_ptx import run_on_gpu, runs_code_for
from microscale.hardware import present
from ptx_kernels import Words
from ptxproof.instructions import form_of
from ptxproof.ptx import instructions

pytestmark = pytest.mark.own("one warp's instructions, translated for the GPU as it is")


class OnGpu:
    sum_error = 33 * 2.0**-23
    """The PTX manual: products and sums in at least single precision, in any order and with any rounding."""

    def both(self, body: str, words: Words, num_out: int, sm: int) -> list[Words]:
        here = present().sm
        if not runs_code_for(sm, here):
            pytest.skip(f"code for SM {sm} does not run on SM {here}")
        plain, translated = translated_for(sm, body, words.shape[1], num_out)
        forms = [form_of(found.instruction.opcode, len(found.instruction.operands)) for found in instructions(plain)]
        results = [run_on_gpu(translated, words, num_out)]
        # FP8 products keep fewer bits than the manual's single precision (``tests/gpu/test_interpret.py``).
        if all(form is None or (here in form.sms and form.name != "FP8 mma") for form in forms):
            results.append(run_on_gpu(plain, words, num_out))
        return results


@pytest.fixture
def ways() -> OnGpu:
    return OnGpu()
