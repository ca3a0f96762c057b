"""A kernel that is launched again, without a GPU: the driver gets what Triton itself would give it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from microscale.hardware import known
from microscale.kernels import binding
from microscale.kernels.launch import launch
from support.fake_driver import FakeDriver, faked

pytestmark = pytest.mark.skipif(binding.PLAIN, reason="the interpreter compiles nothing")
H200 = known("h200")
WARPS = {"num_warps": 1}


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def scaled(  # type: ignore[no-untyped-def]
    x, out, stride, count, BLOCK: tl.constexpr, SCALE: tl.constexpr, NEGATIVE: tl.constexpr = False
):
    rows = tl.arange(0, BLOCK)
    value = tl.load(x + rows * stride, mask=rows < count) * SCALE
    tl.store(out + rows, -value if NEGATIVE else value, mask=rows < count)


@dataclass
class Seen:
    driver: FakeDriver
    asked: list[Any]
    """Launches that Triton itself made."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    asked: list[Any] = []
    run = type(scaled).run

    def noted(fn: Any, *arguments: Any, **rest: Any) -> Any:
        asked.append(arguments)
        return run(fn, *arguments, **rest)

    monkeypatch.setattr(type(scaled), "run", noted)
    scaled.device_caches.clear()
    with faked(H200) as driver:
        yield Seen(driver, asked)
    scaled.device_caches.clear()


def floats(offset: int = 0) -> torch.Tensor:
    return torch.zeros(64)[offset:]


def constants(**changed: Any) -> dict[str, Any]:
    return {"SCALE": 2.0, "BLOCK": 16, **changed}


def test_the_driver_gets_what_triton_would_give_it(seen: Seen) -> None:
    for x, out, count in ((floats(), floats(), 16), (floats(), floats(), 7), (floats(4), floats(8), 1)):
        arguments = x, out, 3, count
        launch(scaled, (2, 3), arguments, constants(), WARPS)
        ours = seen.driver.given[-1]
        scaled.run(*arguments, grid=(2, 3), warmup=False, **constants(), **WARPS)
        theirs = seen.driver.given[-1]
        # Grid, stream, function and attributes; then what hooks would be told and the hooks; then the arguments.
        assert ours[:6] == theirs[:6]
        assert [id(value) for value in ours[9:13]] == [id(value) for value in theirs[9:13]]
        assert ours[13:] == theirs[13:] == (16, 2.0, False)
    assert len(seen.asked) == 1 + 3
    assert len({id(metadata) for metadata in seen.driver.launched}) == 1


@pytest.mark.parametrize("grid", [(5,), (5, 6), (5, 6, 7)])
def test_a_grid_has_three_numbers(grid: tuple[int, ...], seen: Seen) -> None:
    for _ in range(2):
        launch(scaled, grid, (floats(), floats(), 3, 1), constants(), WARPS)
    assert [given[:3] for given in seen.driver.given] == [(*grid, 1, 1)[:3]] * 2
    assert len(seen.asked) == 1


@pytest.mark.parametrize(
    ("arguments", "changed", "warps"),
    [
        pytest.param((floats(1), floats(), 3, 7), {}, 1, id="a pointer that is not aligned"),
        pytest.param((floats(), floats(), 32, 7), {}, 1, id="an integer that divides by 16"),
        pytest.param((floats(), floats(), 1, 7), {}, 1, id="an integer that is 1"),
        pytest.param((floats(), floats(), 1 << 40, 7), {}, 1, id="an integer of 64 bits"),
        pytest.param((floats().half(), floats(), 3, 7), {}, 1, id="another type"),
        pytest.param((floats(), floats(), 3, 7), {"BLOCK": 32}, 1, id="a constant"),
        pytest.param((floats(), floats(), 3, 7), {"NEGATIVE": True}, 1, id="a constant that has a default"),
        pytest.param((floats(), floats(), 3, 7), {}, 2, id="an option"),
    ],
)
def test_what_triton_compiles_anew_is_not_taken_for_the_old(
    arguments: tuple[Any, ...], changed: dict[str, Any], warps: int, seen: Seen
) -> None:
    first = floats(), floats(), 3, 7
    for _ in range(2):
        launch(scaled, (1,), first, constants(), WARPS)
        launch(scaled, (1,), arguments, constants(**changed), {"num_warps": warps})
    one, other, *again = [id(metadata) for metadata in seen.driver.launched]
    assert one != other
    assert again == [one, other]
    assert len(seen.asked) == 2


def test_a_kernel_that_triton_forgot_is_compiled_again(seen: Seen) -> None:
    for _ in range(2):
        launch(scaled, (1,), (floats(), floats(), 3, 7), constants(), WARPS)
    scaled.device_caches.clear()
    launch(scaled, (1,), (floats(), floats(), 3, 7), constants(), WARPS)
    assert len(seen.asked) == 2


def test_a_kernel_that_was_loaded_ahead_is_not_loaded_twice(seen: Seen) -> None:
    scaled.run(floats(), floats(), 3, 7, grid=(1,), warmup=True, **constants(), **WARPS)._init_handles()
    for _ in range(2):
        launch(scaled, (1,), (floats(), floats(), 3, 7), constants(), WARPS)
    assert [loaded.name for loaded in seen.driver.utils.loaded] == ["scaled"]


@pytest.mark.parametrize("chain", ["launch_enter_hook", "launch_exit_hook"])
def test_who_listens_to_tritons_launches_hears_of_all(chain: str, seen: Seen) -> None:
    hooks = getattr(knobs.runtime, chain)

    def hear(metadata: Any) -> None: ...

    hooks.add(hear)
    try:
        for _ in range(3):
            launch(scaled, (1,), (floats(), floats(), 3, 7), constants(), WARPS)
    finally:
        hooks.remove(hear)
    assert len(seen.asked) == 3
    assert all(hooks in given for given in seen.driver.given)
