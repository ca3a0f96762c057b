"""The formats' values, and that none of them is had by a cast whose warnings depend on the platform."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from ptxproof.interpreter.numbers import code_values

TYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
}


@pytest.mark.parametrize("kind", TYPES)
def test_every_code_has_torchs_value(kind: str) -> None:
    dtype = TYPES[kind]
    whole = torch.uint8 if dtype.itemsize == 1 else torch.uint16
    codes = torch.arange(2 ** (8 * dtype.itemsize), dtype=torch.int32).to(whole)
    want = codes.view(dtype).double().numpy()
    with np.errstate(all="raise"):
        found = code_values.__wrapped__(kind)
    np.testing.assert_array_equal(found, want)
    signs = ~np.isnan(want)
    assert (np.signbit(found) == np.signbit(want))[signs].all()


def test_every_e2m1_code() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    np.testing.assert_array_equal(code_values("e2m1"), positive + [-value for value in positive])


KERNEL = """
import numpy as np
from cases_instructions import FLOAT, MATRIX
from ptx_kernels import run_warp, warp_kernel
for one in (*FLOAT, *MATRIX):
    words = one.make()
    run_warp(warp_kernel(one.body, words.shape[1], one.outputs), words, one.outputs)
"""


def test_no_warning_at_import_or_in_a_run() -> None:
    """Every warning is an error here, also those at import and while an instruction is built."""
    setup = "import sys; sys.path.insert(0, sys.argv[1])"
    folder = __file__.rpartition("/")[0]
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", f"{setup}\n{KERNEL}", folder]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
