"""The process that compiles: ``python -m microscale.kernels.compiling PARENT``, with a ``CompileJob`` as JSON on stdin.

Writes a line of JSON for each kernel as it is done. It ends with its parent, and its compilers with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import IO, Any

import triton
from triton.backends.compiler import GPUTarget

from microscale.kernels.compiling.cache import use_cache
from microscale.kernels.compiling.job import CompileJob, slowest_first
from microscale.kernels.compiling.pool import (
    Compilation,
    Died,
    captured,
    die_with_parent,
    find_complaint,
    reason,
    run_forked,
)
from microscale.kernels.compiling.source import build, hash_compiler, modules, shared_modules, source
from microscale.kernels.launch import Kernel


def compile_kernel(kernel: Kernel, target: GPUTarget, log: IO[bytes]) -> dict[str, Any]:
    """In a process of its own: the kernel, and the launcher that belongs to it, into the cache."""
    return _told(partial(_compile, kernel, target), log)


def _compile(kernel: Kernel, target: GPUTarget) -> None:
    made, options = source(kernel, target)
    triton.compile(made, target=target, options=options)
    build(modules(made))


def build_shared(log: IO[bytes]) -> dict[str, Any]:
    """In a process of its own: what every launch loads."""
    return _told(lambda: build(shared_modules()), log)


def _told(work: Callable[[], None], log: IO[bytes]) -> dict[str, Any]:
    began, error = time.monotonic(), None
    with captured(log) as written:
        try:
            work()
        except Exception as raised:  # the compilers raise every kind, and each of them is the finding
            error = reason(raised, written())
    return {"seconds": time.monotonic() - began, "error": error}


def run(job: CompileJob) -> None:
    use_cache(job.folder)
    hash_compiler(job.target)  # once, and not in every fork
    order = slowest_first(job.kernels)
    work: list[Compilation] = [
        build_shared,
        *(partial(compile_kernel, job.kernels[place], job.target) for place in order),
    ]
    for index, answer in run_forked(work, num_workers=job.num_workers):
        told = {"seconds": 0.0, "error": _last_words(answer)} if isinstance(answer, Died) else answer
        print(json.dumps({"index": order[index - 1] if index else None, **told}), flush=True)


def _last_words(died: Died) -> str:
    complaint = find_complaint(died.log)
    return f"the compiler {died.how}" + (f" ({complaint})" if complaint else "")


def main() -> int:
    # SystemExit, so that the compilers are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it ended before we asked for the signal
        return 1
    job = CompileJob.from_json(json.load(sys.stdin.buffer))
    with tempfile.TemporaryDirectory(prefix="microscale-compiling-") as folder:
        tempfile.tempdir = folder  # ptxas' files, also of those that it refuses
        run(job)
    return 0


if __name__ == "__main__":
    sys.exit(main())
