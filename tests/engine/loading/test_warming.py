"""Kernels are made ready while a model loads, by every command that loads one for a GPU; on a CPU nothing is."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from triton import knobs
from typer.testing import CliRunner

from microscale.cli import app
from microscale.engine.config import EngineConfig
from microscale.engine.loading import warming
from microscale.engine.loading.build import build_engine
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared, prepare
from microscale.engine.loading.warming import kernels_ready
from microscale.engine.process import service
from microscale.hardware import Gpu, known, played
from microscale.kernels.compiling.warming import LateKernels
from microscale.kernels.launch import launch
from microscale.models.recorded import Wanted
from microscale.planning.ops import Activations, Kernel, Launch
from support.fake_driver import faked_anew

TINY = EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu")
GB10 = known("gb10")


def as_planned_for(gpu: Gpu) -> Prepared:
    prepared = prepare(TINY)
    return replace(prepared, setup=replace(prepared.setup, gpu=gpu, activations=Activations.BF16))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with knobs.cache.scope(), knobs.compilation.scope():
        yield tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Whoever begins to compile is listed here, and does not."""
    found: list[object] = []
    monkeypatch.setattr(warming, "Warming", lambda *arguments: found.append(arguments))
    return found


def test_kernels_are_compiled_while_the_model_loads(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the model's kernels, by the real compiler; then its launch finds it loaded."""
    listed: dict[Kernel, Launch] = {}
    every = warming.recorded

    def one_of_them(*arguments: Any) -> Mapping[Kernel, Launch]:
        found = every(*arguments)
        name = next(kernel for kernel in found if kernel.short_name == "rms_norm")
        listed[name] = found[name]
        return listed

    monkeypatch.setattr(warming, "recorded", one_of_them)
    told: list[tuple[int, int]] = []
    with faked_anew(GB10) as driver:
        with kernels_ready(
            as_planned_for(GB10), cache, lambda done, total: told.append((done, total)), Wanted(tokens=3)
        ):
            assert "warming" in [thread.name for thread in threading.enumerate()], "beside the caller"
        late = LateKernels()
        late.watch()
        for each in listed.values():
            launch(each.fn, each.grid, each.arguments, each.constants, each.options)
        assert (late.compiled, late.loaded) == (0, 0)
        assert [one.name for one in driver.launched] == ["rms_norm"]
    assert told[-1] == (1, 1)
    assert list(cache.rglob("rms_norm.cubin"))


def test_on_a_cpu_nothing_is_compiled(started: list[object]) -> None:
    with kernels_ready(prepare(TINY)):
        pass
    assert not started


def test_as_another_card_nothing_is_compiled_ahead(started: list[object]) -> None:
    """Compilers in processes know nothing of the translation."""
    with played(GB10), kernels_ready(as_planned_for(GB10)):
        pass
    assert not started


def test_a_load_that_fails_does_not_wait_for_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def __init__(self, *arguments: object) -> None:
            pass

        def start(self) -> None:
            pass

        def finish(self, on_progress: object) -> None:
            raise AssertionError("waited")

    monkeypatch.setattr(warming, "Warming", Never)
    with pytest.raises(KeyboardInterrupt), kernels_ready(as_planned_for(GB10)):
        raise KeyboardInterrupt


# -- who starts so

MODEL = ("gpt-oss-tiny", "--load-format", "dummy", "--device", "cpu")
BENCH = ("--depth", "4", "--json")
COMMANDS = {
    "generate": (("generate", *MODEL, "--prompt-ids", "1,2,3"), Wanted(3)),
    "generate, drawn": (("generate", *MODEL, "--prompt-ids", "1,2,3", "--temperature", "1"), Wanted(3, draws=True)),
    "generate in chunks": (
        ("generate", *MODEL, "--prompt-ids", "1,2,3", "--max-num-batched-tokens", "2"),
        Wanted(2),
    ),
    "bench": (
        ("bench", *MODEL, *BENCH, "--tests", "tg2", "--repeats", "1", "--concurrency", "1,3"),
        Wanted(8192, sequences=3),
    ),
    "bench speculative": (
        (
            "bench",
            *MODEL,
            *BENCH,
            "--speculative-tokens",
            "1",
            "--speculative-acceptance",
            "0.7",
            "--steps",
            "2",
            "--concurrency",
            "1",
        ),
        Wanted(8192, sequences=1),
    ),
    "profile": (("profile", *MODEL, *BENCH, "--prompt", "8"), Wanted(8192, sequences=1)),
}


@contextmanager
def listing(found: list[object]) -> Iterator[None]:
    found.append("begins")
    yield
    found.append("ends")


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_load_while_their_kernels_are_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, expected = COMMANDS[name]
    found: list[object] = []

    def listed_load(*arguments: Any) -> Any:
        found.append("loads")
        return load(*arguments)

    def ready(prepared: Prepared, cache: object, on_kernels: object, wanted: Wanted) -> Any:
        found.append(wanted)
        return listing(found)

    monkeypatch.setattr("microscale.engine.loading.load.load", listed_load)
    monkeypatch.setattr(warming, "kernels_ready", ready)
    run = CliRunner().invoke(app, list(arguments))
    assert run.exit_code == 0, run.output
    assert found == [expected, "begins", "loads", "ends"]


def test_the_engine_process_loads_so_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[object] = []

    def listed_build(*arguments: Any, **named: Any) -> Any:
        found.append("loads")
        return build_engine(*arguments, **named)

    def ready(prepared: Prepared, cache: object, on_kernels: object) -> Any:
        found.append(cache)
        return listing(found)

    monkeypatch.setattr(service, "build_engine", listed_build)
    monkeypatch.setattr(service, "kernels_ready", ready)
    config = EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu", kernel_cache=str(tmp_path))
    with knobs.compilation.scope():  # it listens to compilations from then on
        service.load(config, lambda *arguments, **named: None)
    assert found == [tmp_path, "begins", "loads", "ends"]
