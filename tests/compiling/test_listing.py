"""A list of kernels that was kept is the list that would be made, or it is made anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import microscale
from microscale.backends.ops import Activations, Kernel, Launch
from microscale.backends.plan import Setup
from microscale.backends.precision import PRECISIONS
from microscale.compiling import listing
from microscale.compiling.listing import FOLDER, MOST_LISTS, digest, kept_or_made, launch_of, plain
from microscale.engine.loading.warming import recorded
from microscale.hardware import known
from microscale.kernels.binding import binder
from microscale.models.config import MAX_DRAFT
from microscale.models.families import PRESETS
from microscale.models.recorded import Wanted
from microscale.parallel.sharding import Shard

SETUP = Setup(known("gb10"), Activations.BF16)
CONFIG: Any = PRESETS["gpt-oss-20b"]
MADE_FOR = CONFIG, SETUP, 16, 64


@cache
def launches() -> Mapping[Kernel, Launch]:
    return recorded(*MADE_FOR)


def nobody() -> Mapping[Kernel, Launch]:
    raise AssertionError("made again")


def kept(folder: Path) -> Path:
    """A list, and where it is."""
    kept_or_made(folder, MADE_FOR, launches)
    (path,) = (folder / FOLDER).iterdir()
    return path


@pytest.mark.parametrize(
    ("card", "name", "precision"),
    [
        ("gb10", "gpt-oss-20b", "exact"),
        ("h200", "gpt-oss-120b", "balanced"),
        ("rtx4090", "gemma-4-26b-a4b", "fast"),
        ("b200", "qwen3-30b-a3b", "exact"),
    ],
)
def test_the_next_start_has_the_list_without_making_it(
    card: str, name: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(known(card), Activations.BF16, precision=PRECISIONS[precision])
    made = recorded(PRESETS[name], setup, 16, 8192, MAX_DRAFT)
    made_for = name, setup
    assert kept_or_made(tmp_path, made_for, lambda: made) is made
    found = kept_or_made(tmp_path, made_for, nobody)
    assert list(found) == list(made), "in the same order"
    assert [launch.kernel() for launch in found.values()] == list(made)
    assert places_in_triton(found, monkeypatch) == places_in_triton(made, monkeypatch)


def places_in_triton(launches: Mapping[Kernel, Launch], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Where Triton's table of loaded kernels has each: the texts of its reading of the arguments and of the options."""
    found: list[tuple[str, str]] = []

    def noted(fn: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        _, specialisation, options = binder(fn)(*arguments, **named)
        found.append((str(specialisation), str(options)))
        return SimpleNamespace(_init_handles=lambda: None)

    monkeypatch.setattr(JITFunction, "run", noted)
    for launch in launches.values():
        launch.load()
    return found


def test_a_list_of_a_rank_is_kept_too(tmp_path: Path) -> None:
    """Its sums take addresses of other GPUs."""
    config = CONFIG.sharded(Shard(1, 2))
    made = recorded(config, SETUP, 16, 64)
    kept_or_made(tmp_path, (config, SETUP), lambda: made)
    assert list(kept_or_made(tmp_path, (config, SETUP), nobody)) == list(made)
    assert digest((config, SETUP)) != digest((CONFIG, SETUP))


def of_every_kind(
    pointer: Any, odd_pointer: Any, one: Any, odd: Any, even: Any, wide: Any, unsigned: Any, real: Any, flag: Any,
    nothing: Any, constant: tl.constexpr,
) -> None:  # fmt: skip
    pass


def test_every_kind_of_argument_is_read_as_it_was() -> None:
    @dataclass
    class Tensor:
        dtype: str
        address: int

        def data_ptr(self) -> int:
            return self.address

    values = Tensor("bf16", 32), Tensor("u8", 33), 1, 5, 48, (1 << 40) + 1, (1 << 63) + 16, 1.5, True, None
    kernel = Launch(triton.jit(of_every_kind), (1,), values, {"constant": 0.25}, {"num_warps": 2}, None, None).kernel()
    kinds = [kind for kind, _ in kernel.specialisation]
    assert kinds[:7] == ["*bf16", "*u8", "constexpr", "i32", "i32", "i64", "u64"]
    assert launch_of(kernel).kernel() == kernel


# -- what it is named by


def test_the_name_is_the_same_in_every_process() -> None:
    """Sets come in another order in each."""
    script = """
from microscale.backends.ops import Activations
from microscale.backends.plan import Setup
from microscale.compiling.listing import digest
from microscale.hardware import known
from microscale.models.families import PRESETS
print(digest((PRESETS["gpt-oss-20b"], Setup(known("gb10"), Activations.BF16), 16, 64)))
"""
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2", "3")
    }
    assert found == {digest(MADE_FOR)}


@pytest.mark.parametrize(
    "other",
    [
        (replace(CONFIG, rms_epsilon=1e-6), SETUP, 16, 64),
        (CONFIG, replace(SETUP, gpu=known("rtx5090")), 16, 64),
        (CONFIG, replace(SETUP, precision=PRECISIONS["fast"]), 16, 64),
        (CONFIG, SETUP, 32, 64),
        (CONFIG, SETUP, 16, 64, Wanted(3)),
    ],
)
def test_another_model_card_or_option_has_another_list(other: object) -> None:
    assert digest(other) != digest(MADE_FOR)


def test_a_changed_file_of_this_package_has_another_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    for name, text in (("__init__.py", ""), ("inner/tiles.json", "[1]"), ("inner/model.safetensors", "a")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(microscale, "__file__", str(tmp_path / "__init__.py"))

    def current() -> str:
        listing._package_files.cache_clear()
        return digest(MADE_FOR)

    try:
        first = current()
        assert current() == first
        (tmp_path / "inner" / "model.safetensors").write_text("ab")
        assert current() == first, "weights launch nothing else"
        (tmp_path / "inner" / "tiles.json").write_text("[2]")
        assert current() != first
    finally:
        listing._package_files.cache_clear()


def test_plain_values() -> None:
    class Colour(Enum):
        RED = 1

    assert plain({"b": {3, 20}, "a": (Colour.RED, None, 0.5)}) == [
        ["a", [["Colour", "RED"], None, 0.5]],
        ["b", [20, 3]],
    ]
    with pytest.raises(TypeError, match="object"):
        plain([object()])


# -- what goes wrong


def spoilt(text: str) -> dict[str, str]:
    rows = json.loads(text)
    place = next(place for place, (kind, _) in enumerate(rows[0]["specialisation"]) if kind.startswith("*"))

    def with_first(**changes: Any) -> str:
        return json.dumps([{**rows[0], **changes}, *rows[1:]])

    another = [list(pair) for pair in rows[0]["specialisation"]]
    another[place] = ["*i7", "D"]
    return {
        "empty": "",
        "cut short": text[: len(text) // 2],
        "no list": '{"kernels": 3}',
        "a function that is gone": with_first(name="small.norm_jit.gone"),
        "a module that is gone": with_first(name="small.gone_jit.rms_norm"),
        "another number of parameters": with_first(specialisation=rows[0]["specialisation"][:-1]),
        "a type that is not": with_first(specialisation=another),
    }


@pytest.mark.parametrize(
    "fault",
    [
        "empty", "cut short", "no list", "a function that is gone", "a module that is gone",
        "another number of parameters", "a type that is not",
    ],
)  # fmt: skip
def test_a_list_that_is_no_good_is_made_anew(fault: str, tmp_path: Path) -> None:
    path = kept(tmp_path)
    good = path.read_text()
    path.write_text(spoilt(good)[fault])
    assert kept_or_made(tmp_path, MADE_FOR, launches) is launches()
    assert path.read_text() == good
    assert list(kept_or_made(tmp_path, MADE_FOR, nobody)) == list(launches())


def test_a_list_whose_kernels_are_read_otherwise_is_made_anew(tmp_path: Path) -> None:
    """Triton assumes nothing of an argument any more, say: the kernel of the list would never be launched."""
    path = kept(tmp_path)
    rows = json.loads(path.read_text())
    row, place = next(
        (row, place)
        for row in rows
        for place, (kind, assumed) in enumerate(row["specialisation"])
        if kind == "i32" and assumed is None
    )
    row["specialisation"][place] = ["i32", "D"]
    path.write_text(json.dumps(rows))
    assert kept_or_made(tmp_path, MADE_FOR, launches) is launches()


def test_where_nothing_can_be_written_the_list_is_made_each_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "microscale")
    (tmp_path / FOLDER).write_text("a file, not a folder")
    for _ in range(2):
        assert kept_or_made(tmp_path, MADE_FOR, launches) is launches()
    assert "is not kept for the next start" in caplog.text


def test_what_cannot_be_named_is_told_and_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert kept_or_made(tmp_path, object(), launches) is launches()
    assert "cannot be kept" in caplog.text
    assert not (tmp_path / FOLDER).exists()


def test_the_oldest_lists_go(tmp_path: Path) -> None:
    few = dict(list(launches().items())[:1])
    for number in range(MOST_LISTS):
        kept_or_made(tmp_path, number, lambda: few)
        os.utime(tmp_path / FOLDER / f"{digest(number)}.json", (number, number))
    kept_or_made(tmp_path, 0, nobody)  # used, so the newest now
    kept_or_made(tmp_path, MOST_LISTS, lambda: few)
    names = {path.name for path in (tmp_path / FOLDER).iterdir()}
    assert len(names) == MOST_LISTS
    assert f"{digest(0)}.json" in names
    assert f"{digest(1)}.json" not in names
