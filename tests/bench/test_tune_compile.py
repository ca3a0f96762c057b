"""Compiling ahead: what forked processes compile is what a launch then finds in Triton's cache."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from triton import knobs

from microscale.bench import tune_compile
from microscale.bench.tune_compile import Pointer, compiler_for, fill_cache, light_launches
from microscale.hardware import known
from microscale.kernels.launch import Launch, taken_by
from microscale.kernels.moe import small_batch
from microscale.prove.pool import run_forked

H200 = known("h200")
PARTS = torch.empty((8, 96), dtype=torch.float32)


def add_up(top_k: int) -> None:
    """A small kernel, and another for each ``top_k``."""
    small_batch.combine(PARTS, torch.empty((8 // top_k, 96), dtype=torch.bfloat16), top_k, H200)


def test_a_launch_finds_what_was_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_compile, "usable_cores", lambda: 2)
    started: list[Launch] = []

    def hear(launch: Launch) -> bool:
        started.append(launch)
        return False

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path)
        compiler_for(H200)(partial(add_up, top_k) for top_k in (2, 4, 4))
        compiled = {path.parent.name for path in tmp_path.rglob("*.cubin")}
        assert len(compiled) == 2
        # As Triton does it for a launch, with the tensors themselves.
        with taken_by(hear):
            for top_k in (2, 4):
                add_up(top_k)
        jobs = [partial(fill_cache, launch, H200.sm) for launch in started]
        answers = dict(run_forked(jobs, num_workers=2))
        assert answers == {0: {"compiled": True}, 1: {"compiled": True}}
        assert {path.parent.name for path in tmp_path.rglob("*.cubin")} == compiled


def test_nothing_is_compiled_twice_and_a_failure_is_left_to_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def count(jobs: list[object], **options: object) -> list[object]:
        asked.append(len(jobs))
        return []

    monkeypatch.setattr(tune_compile, "usable_cores", lambda: 2)
    monkeypatch.setattr(tune_compile, "run_forked", count)
    compile_all = compiler_for(H200)
    compile_all(partial(add_up, top_k) for top_k in (1, 2, 4))
    compile_all(partial(add_up, top_k) for top_k in (1, 2, 4))
    compile_all([partial(add_up, 8)])  # one alone is as fast where it is launched
    assert asked == [3]
    with light_launches() as found:
        add_up(2)
    [launch] = found.values()
    assert launch.arguments[0] == Pointer(torch.float32, PARTS.data_ptr())
    broken = launch._replace(options={"no_such_option": 1})
    assert dict(run_forked([partial(fill_cache, broken, H200.sm)], num_workers=1)) == {0: {"compiled": False}}
