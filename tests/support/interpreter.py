"""Runs kernel tests through Triton's interpreter, on a machine without a GPU.

``TRITON_INTERPRET=1`` must be set before Triton is imported and turns every jit function of the process into Python, so
it cannot be mixed with tests that compile. Kernel tests therefore live in files named ``cases_*.py``, which pytest
does not collect by itself; the ``test_*.py`` next to each runs it in a process of its own:

    @first_and_all
    def test_under_the_interpreter(which: str) -> None:
        run_cases("cases_moe_routing.py", which, beside=__file__)

``make test`` runs the first case of each test function there, the nightly run all of them.

To debug one case: ``TRITON_INTERPRET=1 pytest tests/kernels/cases_moe_routing.py -k name``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ALL = "all cases"
_ALL = pytest.param(ALL, marks=pytest.mark.nightly)
first_and_all = pytest.mark.parametrize("which", ["first cases 1/1", _ALL])
thirds_and_all = pytest.mark.parametrize("which", [*(f"first cases {part}/3" for part in (1, 2, 3)), _ALL])
"""For files with many test functions, each of which has a first case."""
sixths_and_all = pytest.mark.parametrize("which", [*(f"first cases {part}/6" for part in range(1, 7)), _ALL])


def run_cases(name: str, which: str, beside: str, timeout: float = 1200) -> None:
    """Run the tests of the file ``name`` in the folder of ``beside`` under the interpreter; fail with their report."""
    path = Path(beside).parent / name
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    # One torch thread: the interpreter's work is small numpy operations, and other tests need the other cores.
    env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", str(path), "-p", "no:cacheprovider", "--tb=short"]
    command += ["-p", "pytest_timeout", "-p", "support.interpreter_patches"]
    command += [] if which == ALL else ["--first-of-each", which.rpartition(" ")[2]]
    command += ["-W", "ignore::RuntimeWarning"]  # numpy's, for inf - inf: a GPU does the same in silence
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, check=False)
    report = (done.stdout + done.stderr)[-6000:]
    if done.returncode != 0:
        pytest.fail(f"{name} failed under the interpreter:\n{report}", pytrace=False)
    if not re.search(r"\b\d+ passed", done.stdout):
        pytest.fail(f"{name} ran no test under the interpreter:\n{report}", pytrace=False)
