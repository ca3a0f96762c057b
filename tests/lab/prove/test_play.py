"""``--as CARD`` of the GPU tests, in a session of its own: when it takes hold, and what it counts over processes. A
driver that starts nothing stands for the GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpu import conftest
from support.play import play

TESTS = Path(__file__).parents[2]
CONFTEST = """
from microscale.hardware import known
from microscale_lab.prove import bridge
from support import play
from support.fake_driver import faked

H200 = known("h200")
driver = faked(H200)

def pytest_addoption(parser):
    play.add_option(parser)

def pytest_configure(config):
    bridge.present = play.present = lambda: H200
    driver.__enter__()
    play.play(config)
"""
CASES = """
import pytest, torch, triton
import triton.language as tl
from microscale.hardware import detect

GPU = detect()

@triton.jit
def largest(x_ptr, y_ptr, BLOCK: tl.constexpr):
    tl.store(y_ptr, tl.max(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0))

@pytest.mark.parametrize("size", [256, 512, 1024, 256])
def test_started(size):
    assert GPU.name == detect().name == "NVIDIA GB10"
    largest[(1,)](torch.zeros(1024), torch.zeros(1), BLOCK=size, num_warps=1)

@pytest.mark.parametrize("turn", [0, 1])
def test_skipped(turn):
    pytest.skip("the card has none of it")
"""


def session(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "no:cacheprovider", "--import-mode=importlib"]
    command += [str(folder), "--rootdir", str(folder), "-c", str(folder / "pytest.ini"), *arguments]
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=580, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {TESTS} {TESTS.parent / 'src'}\n")
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_cases.py").write_text(CASES)
    return tmp_path


@pytest.mark.timeout(600)
def test_the_card_takes_hold_before_modules_are_imported_and_all_processes_count(folder: Path) -> None:
    """Three kernels are started by four tests, in two processes."""
    done = session(folder, "--as", "gb10", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("4 passed, 2 skipped", done.stdout)
    skips, line = re.findall(r"^skipped .*|^as NVIDIA.*", done.stdout, re.MULTILINE)
    assert skips == "skipped 2: the card has none of it"
    assert line.startswith("as NVIDIA GB10 on NVIDIA H200: 3 kernels; spelled out: ")
    assert "max or min of three" in line


def test_the_option_of_the_gpu_tests() -> None:
    parser = pytest.Parser(_ispytest=True)
    conftest.pytest_addoption(parser)
    assert parser.parse(["tests/gpu", "--as", "gb10"]).card == "gb10"


@pytest.mark.parametrize(
    ("card", "reason"),
    [
        ("gb11", "--as gb11: Unknown GPU 'gb11'; known are"),
        ("gb10", "--as gb10: Running NVIDIA GB10's kernels needs a GPU"),
    ],
)
def test_cards_that_cannot_be_played(
    card: str, reason: str, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as given:
        given.setattr(torch.cuda, "is_available", lambda: False)
        given.setattr(pytestconfig, "getoption", lambda name, default=None: card if name == "card" else default)
        with pytest.raises(pytest.UsageError, match=reason):
            play(pytestconfig)
