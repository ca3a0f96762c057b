"""``doctor`` on machines that lack things: what is broken, what is only a note, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import tomllib
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch

from microscale import doctor, hardware
from microscale.doctor import Finding, Severity
from microscale.hardware import triton_faults
from microscale.hardware.triton_faults import TritonFault, TritonForm

ROOT = Path(__file__).parents[1]


def finding(name: str) -> Finding:
    return next(f for f in doctor.examine(offline=True) if f.name == name)


def test_a_machine_without_a_gpu_is_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = doctor.examine(offline=True)
    assert doctor.healthy(findings)
    assert [f.name for f in findings][:3] == ["Microscale", "Python", "torch"]
    assert finding("Driver").status is Severity.NOTE
    assert finding("GPU").status is Severity.NOTE
    assert finding("ptxas").status is Severity.OK
    assert "GiB" in finding("Memory").value
    assert json.loads(json.dumps(doctor.to_json(findings)))["ok"] is True


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The installation says what pyproject.toml says, however old it is."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: project["dependencies"])


def test_a_missing_package_is_broken_and_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("huggingface-hub", "fastapi"):
            raise importlib.metadata.PackageNotFoundError(name)
        return "3.5.9" if name == "triton" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert finding("huggingface-hub").fix == "pip install 'huggingface-hub>=1.0'"
    assert finding("triton").fix == "pip install --upgrade 'triton>=3.6'"
    assert not doctor.healthy(doctor.examine(offline=True))
    # Without the server's packages the core is whole.
    assert finding("Server").status is Severity.NOTE
    assert finding("Server").value == "no fastapi"
    assert "with its dependencies" in (finding("Server").fix or "")


def test_an_old_package_of_the_server_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.7.6" if name == "llguidance" else real(name))
    assert finding("Server").value == "llguidance 1.7.6"
    assert finding("Server").status is Severity.NOTE
    assert doctor.healthy(doctor.examine(offline=True))


def test_the_server_of_a_tree_that_is_not_installed_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    assert finding("Server") == Finding("Server", Severity.OK, "all packages installed")
    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert finding("Server").status is Severity.NOTE
    assert "without being installed" in finding("Server").value


def with_driver(monkeypatch: pytest.MonkeyPatch, stdout: str, returncode: int = 0) -> None:
    """A machine whose nvidia-smi answers this; ptxas still runs for real."""
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        if command[0] == "/usr/bin/nvidia-smi":
            return SimpleNamespace(stdout=stdout, stderr="", returncode=returncode)
        return real(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(subprocess, "run", run)


def test_a_cpu_build_of_torch_beside_a_driver_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, "580.159.03\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert finding("Driver").value == "580.159.03"
    assert finding("GPU").status is Severity.BROKEN
    assert "CUDA support" in (finding("GPU").fix or "")


def test_a_driver_that_fails_shows_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9)
    assert finding("Driver").status is Severity.BROKEN
    assert "couldn't communicate" in finding("Driver").value


@pytest.mark.parametrize(("version", "status"), [("580.65.06", Severity.OK), ("575.57.08", Severity.BROKEN)])
def test_the_driver_is_held_against_what_torch_needs(
    monkeypatch: pytest.MonkeyPatch, version: str, status: Severity
) -> None:
    with_driver(monkeypatch, f"{version}\n")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = finding("Driver")
    assert found.status is status
    assert found.value == f"{version}; torch is built for CUDA 13.0, which needs 580 or newer"
    assert (found.fix is None) == (status is Severity.OK)


def hub_finding(monkeypatch: pytest.MonkeyPatch, address: str, *, offline: bool = False) -> Finding:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    return next(f for f in doctor.examine(offline=offline) if f.name == "Hub")


def test_whether_the_hub_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as hub:  # answers 501
        Thread(target=hub.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{hub.server_port}"
        assert hub_finding(monkeypatch, address) == Finding("Hub", Severity.OK, f"{address} answers")
        hub.shutdown()
    gone = hub_finding(monkeypatch, "http://127.0.0.1:9")
    assert gone.status is Severity.NOTE
    assert "http://127.0.0.1:9 cannot be reached: " in gone.value
    assert "HF_ENDPOINT" in (gone.fix or "")
    assert "switched off" in hub_finding(monkeypatch, address, offline=True).value
    assert "GB free for models in " in finding("Disk").value


def test_gpus_are_listed_and_an_unknown_one_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def detect(index: int) -> hardware.Gpu:
        if index == 1:
            warnings.warn("NVIDIA New is not in the table", hardware.UnknownGpu, stacklevel=1)
        return hardware.known("gb10")

    with_driver(monkeypatch, "580.159.03\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(hardware, "detect", detect)
    monkeypatch.setattr(hardware, "available_memory", lambda gpu, index: 100 * hardware.GIB)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert (
        finding("GPU 0").value == "NVIDIA GB10, SM 12.1 (family sm120), 48 SMs, 100.0 of 120.0 GiB unified memory free"
    )
    assert (finding("GPU 0").status, finding("GPU 1").status) == (Severity.OK, Severity.NOTE)
    for reached in (True, False):
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other, reached=reached: reached)
        assert ("each reads the others' memory" in finding("Ranks").value) == reached
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert not any(f.name == "Ranks" for f in doctor.examine(offline=True))


def one_gb10(monkeypatch: pytest.MonkeyPatch, triton: str) -> None:
    with_driver(monkeypatch, "580.159.03\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(hardware, "detect", lambda index: hardware.known("gb10"))
    monkeypatch.setattr(hardware, "available_memory", lambda gpu, index: 100 * hardware.GIB)
    monkeypatch.setattr(doctor, "installed_triton", lambda: triton)


def test_a_triton_without_faults_of_ours_is_named_and_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gb10(monkeypatch, "3.8.0")
    found = finding("Triton for GPU 0")
    assert found.status is Severity.OK
    assert found.value == "3.8.0 on SM 12.1: 3 known miscompilations, none in our kernels"


def test_a_triton_that_compiles_a_path_of_ours_wrong_is_a_note_with_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = "https://github.com/triton-lang/triton/issues/1"
    fault = TritonFault(TritonForm.SCALED_E4M3, frozenset({"9.9.9"}), frozenset({121}), "all is wrong", address)
    monkeypatch.setattr(triton_faults, "FAULTS", (fault,))
    one_gb10(monkeypatch, "9.9.9+git123")
    found = finding("Triton for GPU 0")
    assert found.status is Severity.NOTE
    assert address in found.value
    assert "grouped experts, block-scaled / dense GEMM, block-scaled" in found.value
    assert doctor.healthy(doctor.examine(offline=True))
