"""torch on first use: by an attribute, by a submodule, from a module that imported it before."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import sys
from microscale.cli import late_torch
late_torch.import_late()
import torch
early = torch
assert not late_torch.is_loaded()
assert "torch._C" not in sys.modules
"""
USES = {
    "an attribute": "torch.zeros(2)",
    "a name": "from torch import Tensor",
    "a submodule": "import torch.nn.functional",
    "an extension": "from torch._C._distributed_c10d import PrefixStore",
    "a submodule that torch itself does not import": "import torch.utils.benchmark",
    "by name": "import importlib; importlib.import_module('torch.nn')",
}
END = """
import torch
assert late_torch.is_loaded()
assert torch is sys.modules["torch"] and torch is not early
assert early.Tensor is torch.Tensor and early.nn.functional is torch.nn.functional
assert torch.equal(early.ones(3) + 1, torch.full((3,), 2.0))
assert sys.modules["torch.nn"] is torch.nn
assert torch._C.__spec__.loader.__class__.__name__ == "ExtensionFileLoader"
"""


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_the_first_use_imports_it(use: str) -> None:
    run = subprocess.run([sys.executable, "-c", BEGIN + use + END], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_it_stays_where_it_is_there() -> None:
    code = """
import sys, torch
from microscale.cli import late_torch
late_torch.import_late()
assert sys.modules["torch"] is torch
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_stands_in_for_a_torch_that_is_not_installed() -> None:
    code = """
import sys
from microscale.cli import late_torch
late_torch.TORCH = "no_such_package"
late_torch.import_late()
assert "no_such_package" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
