"""Packages and modules of kernels on first use: by an attribute, by a submodule, from a module that had them before."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import sys
from microscale.cli import late_imports
late_imports.import_late()
import numpy, torch, triton
early = {"numpy": numpy, "torch": torch, "triton": triton}
assert not any(late_imports.is_loaded(name) for name in early)
assert not {"numpy.linalg", "torch._C", "triton.runtime"} & set(sys.modules)
"""
TORCH = """
import torch
assert late_imports.is_loaded("torch")
assert torch is sys.modules["torch"] and torch is not early["torch"]
assert early["torch"].Tensor is torch.Tensor and early["torch"].nn.functional is torch.nn.functional
assert torch.equal(early["torch"].ones(3) + 1, torch.full((3,), 2.0))
assert sys.modules["torch.nn"] is torch.nn
assert torch._C.__spec__.loader.__class__.__name__ == "ExtensionFileLoader"
"""
TRITON = """
import triton
assert late_imports.is_loaded("triton") and not late_imports.is_loaded("torch")
assert triton is sys.modules["triton"] and early["triton"].jit is triton.jit
assert sys.modules["triton.language"] is triton.language
"""
NUMPY = """
import numpy
assert late_imports.is_loaded("numpy") and not late_imports.is_loaded("torch")
assert numpy is sys.modules["numpy"] and early["numpy"].ndarray is numpy.ndarray
assert early["numpy"].arange(3).sum() == 3
"""
USES = {
    "an attribute of torch": "torch.zeros(2)" + TORCH,
    "a name of torch": "from torch import Tensor" + TORCH,
    "a submodule of torch": "import torch.nn.functional" + TORCH,
    "an extension of torch": "from torch._C._distributed_c10d import PrefixStore" + TORCH,
    "a submodule that torch itself does not import": "import torch.utils.benchmark" + TORCH,
    "torch by name": "import importlib; importlib.import_module('torch.nn')" + TORCH,
    "an attribute of Triton": "triton.__version__" + TRITON,
    "a submodule of Triton": "from triton.runtime.jit import JITFunction" + TRITON,
    "an attribute of numpy": "numpy.zeros(2)" + NUMPY,
    "a submodule of numpy": "import numpy.linalg" + NUMPY,
}


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_first_use_imports_a_package(use: str) -> None:
    run(BEGIN + use)


def test_a_package_stays_where_it_is_there() -> None:
    run("""
import sys, torch
from microscale.cli import late_imports
late_imports.import_late()
assert sys.modules["torch"] is torch
import torch.utils.benchmark
""")


def test_nothing_stands_in_for_a_package_that_is_not_installed() -> None:
    run("""
import sys
from microscale.cli import late_imports
late_imports.PACKAGES = ("no_such_package",)
late_imports.import_late()
assert "no_such_package" not in sys.modules
""")


KERNELS = """
from types import ModuleType
from microscale.kernels.dense import gemm_jit, small_batch_jit
from microscale.kernels.dense import gemm_jit as again
from microscale.kernels import binding, gate
waiting = [module for name, module in sys.modules.items() if isinstance(module, late_imports.LateKernels)]
assert {gemm_jit, small_batch_jit, binding, gate.gate_jit} <= set(waiting)
assert again is gemm_jit is sys.modules["microscale.kernels.dense.gemm_jit"]
assert not late_imports.is_loaded("triton")
assert not hasattr(gemm_jit, "__path__") and gemm_jit.__file__.endswith("gemm_jit.py")
assert not late_imports.is_loaded("triton"), "what the import system asks for is no use"
"""


def test_the_first_use_runs_all_modules_of_kernels() -> None:
    """So keys are stable before a kernel starts, though nobody asked for that module."""
    run(f"""{BEGIN}{KERNELS}
from triton.runtime.jit import DependenciesFinder, JITFunction
assert DependenciesFinder._update_hash.__module__ == "triton.runtime.jit"
assert isinstance(small_batch_jit.small_batch, JITFunction)
from microscale.kernels import keys
assert DependenciesFinder._update_hash is keys._add_callee
assert all(type(module) is ModuleType for module in waiting)
assert gemm_jit is sys.modules["microscale.kernels.dense.gemm_jit"] is sys.modules["microscale.kernels.dense"].gemm_jit
assert gemm_jit.__spec__.loader is gemm_jit.__loader__ and gemm_jit.__loader__.get_source(gemm_jit.__name__)
assert not hasattr(gemm_jit, "late_loader") and not hasattr(gemm_jit, "no_such_name")
from microscale.kernels.moe import with_mlp_jit
assert type(with_mlp_jit) is ModuleType
""")


def test_what_runs_late_launches_what_runs_at_once() -> None:
    """The kernels of a layer, listed with their keys' parts."""
    listed = """
import torch
from microscale.kernels.launch import recording
from microscale.kernels.small import norms
with recording() as found:
    x = torch.empty((4, 2880), dtype=torch.bfloat16, device="meta")
    norms.norm(x, None, torch.empty(2880, dtype=torch.bfloat16, device="meta"), 1e-5, pdl=True)
print([(kernel.name, kernel.specialisation, kernel.options, kernel.fn.cache_key) for kernel in found])
"""
    late = "from microscale.cli import late_imports; late_imports.import_late()\n"
    outs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
            for code in (listed, late + listed)]  # fmt: skip
    assert outs[0] == outs[1]
    assert "norm_jit" in outs[0]
