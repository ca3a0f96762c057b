"""The README's example, run as a user runs it: a file with a kernel of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton

from ptx_kernels import warp_kernel
from ptxproof import TritonLaunch, Unsupported, interpret_ptx

README = Path(__file__).parents[1] / "README.md"


def test_the_example_of_the_readme(tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    script.write_text(code[1])
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    *proofs, right, wrong = run.stdout.splitlines()
    assert proofs == [f"{sm} compiles, 0 bytes spilled" for sm in (80, 90, 121)]
    assert right == "right: True"
    assert re.fullmatch(
        r"wrong: .*ld\.global.* thread \d+ of block 7 accesses \d+ bytes at .*outside of its tensor\.", wrong
    )


def test_ptx_with_arguments() -> None:
    given, result = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    interpret_ptx(warp_kernel("add.u32 %o0, %i0, 1;", 1, 1), (1,), [given, result], shared_bytes=128)
    assert torch.equal(result, given + 1)


def test_what_is_no_jit_function_is_refused() -> None:
    with pytest.raises(Unsupported, match="len is a builtin_function_or_method, which cannot be compiled"):
        TritonLaunch.of(len, (1,))
    tuned = triton.autotune([triton.Config({"BLOCK": 64})], key=[])(triton.jit(test_ptx_with_arguments))
    with pytest.raises(Unsupported, match=r"test_ptx_with_arguments is a Autotuner.*its \.fn"):
        TritonLaunch.of(tuned, (1,))
