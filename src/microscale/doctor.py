"""``microscale doctor``: what this machine has, what is missing, and how to fix it. Works without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from microscale import hardware
from microscale.errors import Unsupported
from microscale.hardware.triton_faults import faults_of, installed_triton, users
from microscale.version import __version__

# Distribution → least version, as in pyproject.toml.
REQUIRED = {"torch": (2, 11), "triton": (3, 6), "numpy": (1, 26), "huggingface-hub": (1, 0), "msgspec": (0, 20)}
# A line of Microscale's metadata that names a dependency and its least version.
DEPENDENCY = re.compile(r"([\w-]+)>=([\d.]+)(?!.*extra ==)")


class Status(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Works, but not as well as it could; ``mend`` says what would help."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Status
    value: str
    mend: str | None = None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _python() -> Finding:
    return Finding("Python", Status.OK, f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    for name, least in REQUIRED.items():
        wanted = ".".join(map(str, least))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, Status.BROKEN, "not installed", f"pip install '{name}>={wanted}'")
            continue
        if _version(version) < least:
            yield Finding(name, Status.BROKEN, version, f"pip install --upgrade '{name}>={wanted}'")
        else:
            yield Finding(name, Status.OK, version)


def _server() -> Finding:
    """What `serve`, `chat` and `quality` need on top of ``REQUIRED``. In vLLM's environment it may be missing."""
    fix = "For serve, chat and quality: pip install microscale"
    try:
        lines = importlib.metadata.requires("microscale") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("Server", Status.NOTE, "unknown: Microscale runs here without being installed", fix)
    lacking = []
    for name, least in (line.groups() for line in map(DEPENDENCY.match, lines) if line):
        if name in REQUIRED:
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(f"no {name}")
            continue
        if _version(version) < _version(least):
            lacking.append(f"{name} {version}")
    if lacking:
        return Finding("Server", Status.NOTE, ", ".join(lacking), fix)
    return Finding("Server", Status.OK, "all packages installed")


def _ptxas() -> Finding:
    """Triton carries its own assembler; without it no kernel can be compiled."""
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else None
    path = folder / "ptxas" if folder and (folder / "ptxas").exists() else shutil.which("ptxas")
    if path is None:
        mend = "Reinstall triton from a wheel: pip install --force-reinstall triton"
        return Finding("ptxas", Status.BROKEN, "not found", mend)
    try:
        text = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("ptxas", Status.BROKEN, f"{path} does not run: {error}", "Reinstall triton from a wheel.")
    release = re.search(r"release [\d.]+, V([\d.]+)", text)
    return Finding("ptxas", Status.OK, f"{release[1] if release else 'unknown version'} at {path}")


def _driver() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        mend = "Install the NVIDIA driver if this machine has a GPU; without one Microscale runs on the CPU."
        return Finding("Driver", Status.NOTE, "no nvidia-smi on the PATH", mend)
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("Driver", Status.BROKEN, f"nvidia-smi does not run: {error}", "Reinstall the NVIDIA driver.")
    lines = answer.stdout.strip().splitlines()
    if answer.returncode or not lines:
        said = (answer.stdout + answer.stderr).strip() or f"exit status {answer.returncode}"
        return Finding("Driver", Status.BROKEN, said.splitlines()[0], "Reload or reinstall the NVIDIA driver.")
    return Finding("Driver", Status.OK, lines[0])


def _triton_faults(gpu: hardware.Gpu, name: str) -> Finding:
    """Whether the Triton at hand is known to compile something wrong for this card, and in which of our kernels."""
    version = installed_triton()
    faults = faults_of(version, gpu.sm)
    touched = {fault: paths for fault in faults if (paths := users(fault.form))}
    if not touched:
        known = f"{len(faults)} forms known to be wrong, none in our kernels" if faults else "no form known to be wrong"
        return Finding(f"Triton for {name}", Status.OK, f"{version} on SM {gpu.capability}: {known}")
    said = "; ".join(f"{f.form}: {f.what} ({f.issue}); refused: {' / '.join(paths)}" for f, paths in touched.items())
    mend = "Install a Triton that is not affected; until then other paths run, and explain says which."
    return Finding(f"Triton for {name}", Status.NOTE, f"{version} on SM {gpu.capability} is wrong in {said}", mend)


def _gpus(has_driver: bool) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        mend = None
        if has_driver and torch.version.cuda is None:
            mend = "This torch is built for CPUs: reinstall torch with CUDA support."
        elif has_driver:
            mend = f"torch is built for CUDA {torch.version.cuda}, which needs a newer driver than this one."
        yield Finding("GPU", Status.NOTE if mend is None else Status.BROKEN, "none that torch can use", mend)
        return
    for index in range(torch.cuda.device_count()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                gpu = hardware.detect(index)
            except Unsupported as error:
                yield Finding(f"GPU {index}", Status.NOTE, torch.cuda.get_device_name(index), str(error))
                continue
        free = hardware.available_memory(gpu, index) / hardware.GIB
        kind = "unified" if gpu.unified else "GPU"
        value = (
            f"{gpu.name}, SM {gpu.capability} (family {gpu.family.name}), {gpu.num_sms} SMs, "
            f"{free:.1f} of {gpu.memory_bytes / hardware.GIB:.1f} GiB {kind} memory free"
        )
        unknown = next((str(w.message) for w in caught if issubclass(w.category, hardware.UnknownGpu)), None)
        yield Finding(f"GPU {index}", Status.NOTE if unknown else Status.OK, value, unknown)
        yield _triton_faults(gpu, f"GPU {index}")


def _memory() -> Finding:
    total, available = (size / hardware.GIB for size in hardware.system_memory())
    return Finding("Memory", Status.OK, f"{available:.1f} of {total:.1f} GiB available")


def examine() -> list[Finding]:
    """Look at everything, in the order in which a user would mend it."""
    driver = _driver()
    return [
        Finding("Microscale", Status.OK, __version__),
        _python(),
        *_packages(),
        _server(),
        _ptxas(),
        driver,
        *_gpus(driver.status is Status.OK),
        _memory(),
    ]


def healthy(findings: list[Finding]) -> bool:
    """Nothing is broken; notes do not count."""
    return all(finding.status is not Status.BROKEN for finding in findings)


def to_json(findings: list[Finding]) -> dict[str, Any]:
    return {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}
