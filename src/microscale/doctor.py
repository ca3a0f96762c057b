"""``microscale doctor``: what this machine has, what is missing, and how to fix it. Works without a GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
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

# Distribution → minimum version, as in pyproject.toml.
REQUIRED = {"torch": (2, 11), "triton": (3, 6), "numpy": (1, 26), "huggingface-hub": (1, 0), "msgspec": (0, 20)}
LEAST_DRIVER = {"12": 525, "13": 580}
"""Major version of CUDA → the first driver that runs it."""
HUB_S = 3.0
"""How long the hub may take to answer."""
# A line of Microscale's metadata that names a dependency and its least version.
DEPENDENCY = re.compile(r"([\w-]+)>=([\d.]+)(?!.*extra ==)")


class Severity(StrEnum):
    OK = "ok"
    NOTE = "note"
    """It works, but could be better; ``fix`` says how."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: Severity
    value: str
    fix: str | None = None


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _python() -> Finding:
    return Finding("Python", Severity.OK, f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Finding]:
    for name, minimum in REQUIRED.items():
        wanted = ".".join(map(str, minimum))
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, Severity.BROKEN, "not installed", f"pip install '{name}>={wanted}'")
            continue
        if _version(version) < minimum:
            yield Finding(name, Severity.BROKEN, version, f"pip install --upgrade '{name}>={wanted}'")
        else:
            yield Finding(name, Severity.OK, version)


def _server() -> Finding:
    """What `serve`, `chat` and `quality` need on top of ``REQUIRED``. In vLLM's environment it may be missing."""
    fix = "For serve, chat and quality install Microscale with its dependencies."
    try:
        lines = importlib.metadata.requires("microscale") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("Server", Severity.NOTE, "unknown: Microscale runs here without being installed", fix)
    missing = []
    for name, least in (line.groups() for line in map(DEPENDENCY.match, lines) if line):
        if name in REQUIRED:
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(f"no {name}")
            continue
        if _version(version) < _version(least):
            missing.append(f"{name} {version}")
    if missing:
        return Finding("Server", Severity.NOTE, ", ".join(missing), fix)
    return Finding("Server", Severity.OK, "all packages installed")


def _ptxas() -> Finding:
    """Triton comes with its own assembler, without which it compiles no kernel."""
    spec = importlib.util.find_spec("triton")
    folder = Path(spec.origin).parent / "backends/nvidia/bin" if spec and spec.origin else None
    path = folder / "ptxas" if folder and (folder / "ptxas").exists() else shutil.which("ptxas")
    if path is None:
        fix = "Reinstall triton from a wheel: pip install --force-reinstall triton"
        return Finding("ptxas", Severity.BROKEN, "not found", fix)
    try:
        text = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("ptxas", Severity.BROKEN, f"{path} does not run: {error}", "Reinstall triton from a wheel.")
    release = re.search(r"release [\d.]+, V([\d.]+)", text)
    return Finding("ptxas", Severity.OK, f"{release[1] if release else 'unknown version'} at {path}")


def _driver() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        fix = "Install the NVIDIA driver if this machine has a GPU; without one Microscale runs on the CPU."
        return Finding("Driver", Severity.NOTE, "no nvidia-smi on the PATH", fix)
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("Driver", Severity.BROKEN, f"nvidia-smi does not run: {error}", "Reinstall the NVIDIA driver.")
    lines = answer.stdout.strip().splitlines()
    if answer.returncode or not lines:
        output = (answer.stdout + answer.stderr).strip() or f"exit status {answer.returncode}"
        return Finding("Driver", Severity.BROKEN, output.splitlines()[0], "Reload or reinstall the NVIDIA driver.")
    return _driver_for_torch(lines[0])


def _driver_for_torch(version: str) -> Finding:
    """The driver against what the installed torch was built for."""
    cuda = torch.version.cuda
    least = LEAST_DRIVER.get((cuda or "").partition(".")[0])
    if least is None:
        return Finding("Driver", Severity.OK, version)
    value = f"{version}; torch is built for CUDA {cuda}, which needs {least} or newer"
    if _version(version)[:1] >= (least,):
        return Finding("Driver", Severity.OK, value)
    return Finding("Driver", Severity.BROKEN, value, f"Install driver {least} or newer, or a torch for an older CUDA.")


def _triton_faults(gpu: hardware.Gpu, name: str) -> Finding:
    """Known miscompilations of the installed Triton for this card, and which of our kernels they affect."""
    version = installed_triton()
    faults = faults_of(version, gpu.sm)
    affected = {fault: paths for fault in faults if (paths := users(fault.form))}
    if not affected:
        known = f"{len(faults)} known miscompilations, none in our kernels" if faults else "no known miscompilation"
        return Finding(f"Triton for {name}", Severity.OK, f"{version} on SM {gpu.capability}: {known}")
    details = "; ".join(
        f"{f.form}: {f.what} ({f.issue}); not used: {' / '.join(paths)}" for f, paths in affected.items()
    )
    fix = "Install a Triton without this fault; until then other kernels run, and explain shows which."
    return Finding(f"Triton for {name}", Severity.NOTE, f"{version} on SM {gpu.capability} miscompiles {details}", fix)


def _gpus(has_driver: bool) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        fix = None
        if has_driver and torch.version.cuda is None:
            fix = "This torch is built for CPUs: reinstall torch with CUDA support."
        elif has_driver:
            fix = f"torch is built for CUDA {torch.version.cuda}, which needs a newer driver than this one."
        yield Finding("GPU", Severity.NOTE if fix is None else Severity.BROKEN, "none that torch can use", fix)
        return
    for index in range(torch.cuda.device_count()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                gpu = hardware.detect(index)
            except Unsupported as error:
                yield Finding(f"GPU {index}", Severity.NOTE, torch.cuda.get_device_name(index), str(error))
                continue
        free = hardware.available_memory(gpu, index) / hardware.GIB
        kind = "unified" if gpu.unified else "GPU"
        value = (
            f"{gpu.name}, SM {gpu.capability} (family {gpu.family.name}), {gpu.num_sms} SMs, "
            f"{free:.1f} of {gpu.memory_bytes / hardware.GIB:.1f} GiB {kind} memory free"
        )
        unknown = next((str(w.message) for w in caught if issubclass(w.category, hardware.UnknownGpu)), None)
        yield Finding(f"GPU {index}", Severity.NOTE if unknown else Severity.OK, value, unknown)
        yield _triton_faults(gpu, f"GPU {index}")


def _ranks() -> Iterator[Finding]:
    """What several GPUs can do together."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < 2:
        return
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]
    reached = all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
    access = "each reads the others' memory" if reached else "not all read each other's memory, so sums are slower"
    yield Finding("Ranks", Severity.OK, f"{count} GPUs, and {access}; --tensor-parallel-size shares a model over them")


def _hub(*, offline: bool) -> Iterator[Finding]:
    """Whether models can be downloaded, and the room for them."""
    try:
        constants = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return  # reported with the packages
    if offline:
        yield Finding("Hub", Severity.NOTE, "downloads are switched off by HF_HUB_OFFLINE or MICROSCALE_OFFLINE")
    else:
        yield _reached(constants.ENDPOINT)
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    yield Finding("Disk", Severity.OK, f"{free / 1e9:.0f} GB free for models in {cache}")


def _reached(address: str) -> Finding:
    try:
        with urllib.request.urlopen(address, timeout=HUB_S):
            pass
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        fix = "Models on the disk run without it. HF_ENDPOINT names a mirror; HTTPS_PROXY names a proxy."
        return Finding("Hub", Severity.NOTE, f"{address} cannot be reached: {reason}", fix)
    return Finding("Hub", Severity.OK, f"{address} answers")


def _memory() -> Finding:
    total, available = (size / hardware.GIB for size in hardware.system_memory())
    return Finding("Memory", Severity.OK, f"{available:.1f} of {total:.1f} GiB available")


def examine(*, offline: bool = False) -> list[Finding]:
    """All findings, in the order in which a user would fix them. ``offline``: do not try to reach the hub."""
    driver = _driver()
    return [
        Finding("Microscale", Severity.OK, __version__),
        _python(),
        *_packages(),
        _server(),
        _ptxas(),
        driver,
        *_gpus(driver.status is Severity.OK),
        *_ranks(),
        _memory(),
        *_hub(offline=offline),
    ]


def healthy(findings: list[Finding]) -> bool:
    """True if nothing is broken; notes do not count."""
    return all(finding.status is not Severity.BROKEN for finding in findings)


def to_json(findings: list[Finding]) -> dict[str, Any]:
    return {"ok": healthy(findings), "findings": [asdict(finding) for finding in findings]}
