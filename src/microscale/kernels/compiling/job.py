"""Compiles a list of kernels into the cache, in processes.

The list goes as JSON to a process of its own (``__main__``), which imports no torch and has one thread. It
forks a compiler for each kernel and reports each as it ends. So the caller may have threads and a GPU at work, like an
engine that reads its weights meanwhile. The compilers end with the caller, and one that fails or hangs costs only its
kernel. A launch looks for the files that are written here, and each of them appears whole or not at all.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager

from microscale.kernels.compiling.pool import usable_cores
from microscale.kernels.compiling.source import cache_hash, is_built, modules, shared_modules, source
from microscale.kernels.launch import Kernel

COMMAND = (sys.executable, "-P", "-m", "microscale.kernels.compiling")
"""``-P``: a file of the current directory is never imported instead of a module."""
MEMORY_PER_WORKER = 512 << 20
"""Bytes that one compiler may take. The largest kernels of an H200 take 0.17 GB, and ptxas as much (Triton 3.7.1)."""
PACKAGE = "microscale.kernels"
"""Below it are the modules that ``Kernel.name`` names."""
SLOW = (
    "moe.grouped_resident_jit.grouped_gemm_resident",
    "sampling.search_jit.settle",
    "attention.fused_verify_jit.attend_verify",
    "attention.fused_decode_jit.attend_fused",
    "moe.grouped_wgmma_jit.grouped_gemm",
    "moe.small_batch_jit.down_direct",
    "attention.paged_jit.attend_long",
    "attention.paged_jit.attend_short",
    "dense.from_sum_jit.small_batch_from_sum",
    "dense.small_batch_jit.small_batch",
)
"""What takes the compilers longest, in this order: 13 to 4 s each of two shared cores of a Xeon, for an H200 (Triton
3.7.1). They begin first, so that none of them is alone at the end; 15 compilers are done after 13 s of these and not
after 18."""
PLAIN_VALUES = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class CompileResult:
    """One kernel that was compiled, or could not be. ``kernel`` is ``None`` for what all launches share."""

    kernel: Kernel | None
    seconds: float
    error: str | None

    @property
    def name(self) -> str:
        return self.kernel.label if self.kernel else "Triton's module for the driver"


@dataclass(frozen=True)
class CompileJob:
    """What to compile, for which GPU, and into which folder."""

    kernels: Sequence[Kernel]
    target: GPUTarget
    folder: Path
    num_workers: int

    def to_json(self) -> dict[str, Any]:
        return {
            "sm": self.target.arch,
            "warp_size": self.target.warp_size,
            "folder": str(self.folder),
            "num_workers": self.num_workers,
            "kernels": [kernel_to_json(kernel) for kernel in self.kernels],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CompileJob:
        target = GPUTarget("cuda", data["sm"], data["warp_size"])
        return cls(
            [kernel_from_json(each) for each in data["kernels"]], target, Path(data["folder"]), data["num_workers"]
        )


def kernel_to_json(kernel: Kernel) -> dict[str, Any]:
    values = [value for _, value in (*kernel.specialisation, *kernel.options)]
    if odd := [value for value in values if type(value) not in PLAIN_VALUES]:
        raise TypeError(f"{kernel.name} takes the constant {odd[0]!r}, which cannot be sent to another process.")
    return {"name": kernel.name, "specialisation": kernel.specialisation, "options": kernel.options}


def kernel_from_json(data: dict[str, Any]) -> Kernel:
    module, _, function = data["name"].rpartition(".")
    fn = getattr(importlib.import_module(f"{PACKAGE}.{module}"), function)
    pairs = {key: tuple((name, value) for name, value in data[key]) for key in ("specialisation", "options")}
    return Kernel(data["name"], pairs["specialisation"], pairs["options"], fn)


def is_compiled(kernel: Kernel, target: GPUTarget) -> bool:
    """Whether the cache in use has all that a launch of the kernel needs."""
    try:
        made, _ = source(kernel, target)
    except Exception:  # Triton refuses the options, with any error; compiling the kernel reports it
        return False
    entry = get_cache_manager(cache_hash(kernel, target))
    if entry.get_group(f"{made.name[:150]}.json") is None:  # as ``triton.compile`` names it
        return False
    return all(is_built(*each) for each in modules(made).items())


def missing(kernels: Iterable[Kernel], target: GPUTarget) -> list[Kernel]:
    """Those that the cache in use does not have."""
    return [kernel for kernel in kernels if not is_compiled(kernel, target)]


def shared_missing() -> bool:
    """Whether the cache lacks what every launch loads."""
    return not all(is_built(*each) for each in shared_modules().items())


def workers(available_bytes: int, spare_cores: int = 0) -> int:
    """How many compilers may run at once, in so much memory, with some cores left for other work."""
    return max(1, min(usable_cores() - spare_cores, available_bytes // MEMORY_PER_WORKER))


def slowest_first(kernels: Sequence[Kernel]) -> list[int]:
    """Places in ``kernels``, in the order in which they are best compiled."""
    ranks = {name: rank for rank, name in enumerate(SLOW)}
    return sorted(range(len(kernels)), key=lambda place: ranks.get(kernels[place].name, len(SLOW)))


def run_job(job: CompileJob) -> Iterator[CompileResult]:
    """Compile, and yield each kernel as it is done: first what all launches share, if it was missing."""
    process = subprocess.Popen([*COMMAND, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    left = dict(enumerate(job.kernels))
    try:
        try:
            with process.stdin:
                process.stdin.write(json.dumps(job.to_json()).encode())
        except BrokenPipeError:
            pass  # it is gone, and its exit status says how
        for line in process.stdout:
            answer = json.loads(line)
            kernel = None if answer["index"] is None else left.pop(answer["index"])
            yield CompileResult(kernel, answer["seconds"], answer["error"])
        status = process.wait()
        for kernel in left.values():
            yield CompileResult(kernel, 0.0, f"the compiling process ended with status {status}")
    finally:
        process.stdout.close()
        process.terminate()
        process.wait()
