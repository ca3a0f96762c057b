"""Compiling ahead: what a launch will want is in the cache, and nothing is compiled twice."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget

from microscale.hardware import known
from microscale.kernels.compiling.job import CompileJob, CompileResult, missing
from microscale.kernels.launch import recording
from microscale.kernels.moe import small_batch
from microscale_lab.tune import compiling as tune_compile
from microscale_lab.tune.compiling import compiler_for

H200 = known("h200")


def add_up(top_k: int) -> None:
    """A small kernel, and another for each ``top_k``."""
    parts = torch.empty((8, 96), dtype=torch.float32)
    small_batch.combine(parts, torch.empty((8 // top_k, 96), dtype=torch.bfloat16), top_k, H200)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path) -> Iterator[None]:
    with knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path)
        yield


def test_what_was_compiled_ahead_is_in_the_cache() -> None:
    with recording() as found:
        for top_k in (2, 4):
            add_up(top_k)
    target = GPUTarget("cuda", 90, 32)
    assert missing(found, target) == list(found)
    compiler_for(H200)(partial(add_up, top_k) for top_k in (2, 4, 4))
    assert len(found) == 2
    assert missing(found, target) == []


def test_nothing_is_compiled_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def count(job: CompileJob) -> list[CompileResult]:
        asked.append(len(job.kernels))
        return []

    monkeypatch.setattr(tune_compile, "run_job", count)
    compile_all = compiler_for(H200)
    compile_all(partial(add_up, top_k) for top_k in (1, 2, 4))
    compile_all(partial(add_up, top_k) for top_k in (1, 2, 4))
    compile_all([partial(add_up, 8)])  # one alone is as fast where it is launched
    assert asked == [3]
