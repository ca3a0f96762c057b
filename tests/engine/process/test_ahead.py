"""The GPU is opened while torch is imported: by the calls of a driver, here one that writes down what it is asked."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from microscale.engine.process import ahead
from microscale.engine.process.ahead import has_own_memory, open_gpu, start_driver, torch_has_cuda
from support.stub_driver import StubDriver


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return StubDriver(tmp_path_factory.mktemp("driver")).path


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "log"
    path.write_text("")
    monkeypatch.setenv("STUB_LOG", str(path))
    return path


@pytest.mark.parametrize(("device", "number"), [("auto", 0), ("cuda", 0), ("cuda:3", 3)])
def test_the_gpu_that_is_named_is_opened(driver: str, log: Path, device: str, number: int) -> None:
    assert open_gpu(device, driver)
    assert log.read_text().split() == ["init", "0", "device", str(number), "context", str(40 + number)]


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:x", "cuda:-1", "gpu"])
def test_nothing_else_is(driver: str, log: Path, device: str) -> None:
    assert not open_gpu(device, driver)
    assert log.read_text() == ""


@pytest.mark.parametrize("refused", ["init", "device", "context"])
def test_a_driver_that_refuses_is_left_to_torch(
    driver: str, log: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setenv("STUB_REFUSES", refused)
    assert not open_gpu("auto", driver)
    assert log.read_text().splitlines()[-1].startswith(refused)


def test_a_gpu_that_shares_the_cpus_memory_is_known(driver: str, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the stub's GPUs it is the second."""
    assert [has_own_memory(device, driver) for device in ("auto", "cuda:1", "cuda:2", "cpu")] == [
        True,
        False,
        True,
        False,
    ]
    assert log.read_text().splitlines()[:3] == ["init 0", "device 0", "asked 18"]
    for refused in ("init", "device", "asked"):
        monkeypatch.setenv("STUB_REFUSES", refused)
        assert not has_own_memory("cuda:2", driver)
    assert not has_own_memory("auto", driver + ".none")


@pytest.mark.parametrize("has_cuda", [True, False])
def test_the_driver_is_started_before_a_gpu_is_named(
    driver: str, log: Path, monkeypatch: pytest.MonkeyPatch, has_cuda: bool
) -> None:
    """For a torch that can use it; no context is made."""
    monkeypatch.setattr(ahead, "torch_has_cuda", lambda: has_cuda)
    start_driver(driver)
    for thread in threading.enumerate():
        if thread.name == "driver":
            thread.join()
    assert log.read_text().split() == (["init", "0", "device", "0"] if has_cuda else [])


def test_without_a_driver_there_is_nothing_to_open(tmp_path: Path) -> None:
    assert not open_gpu("auto", str(tmp_path / "libcuda.so.1"))


def test_it_waits_for_no_import() -> None:
    code = "import sys, microscale.engine.process.ahead; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_what_torch_was_built_for_is_known_without_it() -> None:
    assert torch_has_cuda() == (torch.version.cuda is not None)
