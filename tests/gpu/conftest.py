"""Tests that need a real GPU: ``make gpu-test``. Elsewhere they are not collected.

Every kernel that a test starts is held against what is recorded for ``prove``. A module says whose kernels it starts:

    pytestmark = pytest.mark.starts("gpt-oss-20b", {"num_hidden_layers": 4})   # a preset, with overrides
    pytest.mark.starts("gpt-oss-20b", {}, Setting("fast"))                      # and as somebody asks for it
    pytestmark = pytest.mark.drafts("gpt-oss-20b-eagle3")                       # a draft head's preset
    pytestmark = pytest.mark.odd_shapes                                         # sizes that no model has

Sizes are constants of many kernels, so those of odd shapes are in no list: there the jit function must be one that some
model starts.

``--as gb10`` runs all of it with another card's kernels (``support/play``). What belongs to the GPU itself, as a tuning
or a command in a process of its own, is marked ``own`` and then skipped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from microscale.hardware import detect, known
from microscale.kernels.launch import Kernel, watching
from microscale.models.families import preset
from microscale_lab.prove.inventory import SETTINGS, Setting, heads, record_setting, recorded
from support.listed import assert_listed
from support.play import add_option, is_played, play

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "src" / "microscale"
REAL = ("gpt-oss-20b", "gpt-oss-120b", "gemma-4-26b-a4b", "qwen3-30b-a3b", "qwen3.6-35b-a3b")


collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if collect_ignore_glob:
        terminalreporter.write_line("tests/gpu is left out: there is no GPU")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "starts(preset, overrides, setting): the model whose kernels the tests start")
    config.addinivalue_line("markers", "drafts(preset): the draft head whose kernels the tests start")
    config.addinivalue_line("markers", "odd_shapes: the tests start kernels at sizes that no model has")
    config.addinivalue_line("markers", "own(reason): belongs to the GPU as it is; skipped where it plays another card")
    play(config)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_own(items if is_played(config) else [])


def skip_own(items: list[pytest.Item]) -> None:
    for item in items:
        if (marker := item.get_closest_marker("own")) is not None:
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))


@cache
def of_real_models() -> Mapping[Kernel, list[str]]:
    """What ``prove`` compiles for this card, of the presets: all settings, and vLLM's shards."""
    return recorded(detect(), REAL)


@cache
def of_heads() -> Mapping[Kernel, list[str]]:
    """What draft heads start."""
    return recorded(detect(), tuple(heads()))


@cache
def of_block_scaled() -> Mapping[Kernel, list[str]]:
    """What a card with block-scaled matrix instructions starts: tests run those kernels on other cards too."""
    return recorded(known("gb10"), REAL[1:4], SETTINGS[1:3])


def names_of_real_models(config: pytest.Config) -> set[str]:
    """Every jit function of ``of_real_models``, ``of_heads`` and ``of_block_scaled``. Recording takes a minute, so
    pytest's own cache keeps the names until a source changes: with ``-n`` every process would record."""
    sources = b"".join(file.read_bytes() for file in sorted(SOURCES.rglob("*.py")))
    key = f"microscale/started/{detect().name}-{hashlib.sha256(sources).hexdigest()[:16]}"
    kept: pytest.Cache | None = getattr(config, "cache", None)  # not there with -p no:cacheprovider
    names = None if kept is None else kept.get(key, None)
    if names is None:
        names = sorted({kernel.name for kernel in (*of_real_models(), *of_heads(), *of_block_scaled())})
        if kept is not None:
            kept.set(key, names)
    return set(names)


@cache
def of_model(name: str, overrides: tuple[tuple[str, object], ...], setting: Setting) -> Collection[Kernel]:
    """What is recorded of one model as somebody asks for it."""
    kernels = record_setting(preset(name, {key: _thawed(value) for key, value in overrides}), detect(), setting)
    assert kernels is not None
    return kernels


def _thawed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _frozen(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


@pytest.fixture(autouse=True)
def every_kernel_is_listed(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test starts must be what ``prove`` compiles."""
    with watching() as started:
        yield
    if request.node.get_closest_marker("odd_shapes") is not None:
        unknown = {k.name for k in started} - names_of_real_models(request.config)
        assert not unknown, f"no model starts {unknown}: is it needed?"
        return
    marker = request.node.get_closest_marker("starts")
    head = request.node.get_closest_marker("drafts")
    if head is not None:
        assert_listed(started, recorded(detect(), [head.args[0]]))
    elif marker is None:
        assert_listed(started, of_real_models())
    else:
        name, overrides, *setting = marker.args
        frozen = tuple((key, _frozen(value)) for key, value in overrides.items())
        assert_listed(started, of_model(name, frozen, *(setting or SETTINGS[:1])))
