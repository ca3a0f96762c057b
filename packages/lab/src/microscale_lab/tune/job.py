"""What ``microscale tune`` measures with: a case with its tensors, and the fastest of some tiles for it.

Kernels of all tiles are compiled first, side by side, from a recording of what they would start; then each tile runs
alone, checked and timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Protocol, TypeVar

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from microscale.errors import MicroscaleError
from microscale.hardware import Family, Gpu
from microscale.hardware.tiles.tuned import Measurement, Section, TunedTile, trial
from microscale_lab.tune.compiling import Compile

TimeUs = Callable[[Callable[[], object]], float]
ResultT = TypeVar("ResultT")
QUICK_TILES = 4
"""Candidates of a case that ``--quick`` measures: the one in use, and some from all over the list."""


@dataclass(frozen=True)
class TuningProblem:
    """A case with its tensors. Both functions start kernels with whatever tile is on trial."""

    work: Callable[[], object]
    """What is timed."""
    error: Callable[[], float]
    """The relative RMS error of one call against the reference."""
    max_error: float
    calls: int = 1
    """Of the layer, in ``work``: several with weights of their own, so that none are read from L2."""

    def under(self, section: Section[Any, Any], family: Family, key: Any, tile: Any) -> TuningProblem:
        """The same with a tile on trial."""

        def tried(call: Callable[[], ResultT]) -> Callable[[], ResultT]:
            def run() -> ResultT:
                with trial(section, family, key, tile):
                    return call()

            return run

        return replace(self, work=tried(self.work), error=tried(self.error))


def together(problems: Sequence[TuningProblem]) -> TuningProblem:
    """One call of each, checked and timed as one."""
    return TuningProblem(
        lambda: [problem.work() for problem in problems],
        lambda: max((problem.error() for problem in problems), key=lambda error: (error != error, error)),
        min(problem.max_error for problem in problems),
        problems[0].calls,
    )


def measure(problem: TuningProblem, time_us: TimeUs) -> float:
    """Microseconds, or infinity where the answer is wrong or the kernel cannot be built or launched."""
    return time_us(problem.work) / problem.calls if is_right(problem) else float("inf")


def is_right(problem: TuningProblem) -> bool:
    """Whether the kernel can be built and launched, and its answer is the reference's."""
    try:
        error = problem.error()
    except (OutOfResources, CompilationError, PTXASError):
        return False
    except RuntimeError as failure:
        # A pass of Triton's compiler, or the driver.
        if not any(text in str(failure) for text in ("PassManager", "too many resources")):
            raise
        return False
    # Not a number, too, is wrong.
    return error <= problem.max_error


@dataclass(frozen=True)
class Timed:
    """A tile with its time, and how many others gave a right answer."""

    tile: Any
    us: float
    right: int
    next_us: float | None

    @property
    def text(self) -> str:
        second = "" if self.next_us is None else f"; the next {self.next_us:.1f} us"
        return f"the best of {self.right} tiles{second}"


@dataclass(frozen=True)
class Bench:
    """A card that is measured."""

    gpu: Gpu
    time_us: TimeUs
    command: str
    """As it was called: part of every row."""
    compile: Compile
    """Before kernels are started for the first time."""
    advance: Callable[[], None]
    device: str
    quick: bool = False

    def compile_ahead(self, problems: Iterable[TuningProblem]) -> None:
        """All kernels that these would start, side by side."""
        self.compile(problem.work for problem in problems)

    def fastest(
        self, section: Section[Any, Any], key: Any, tiles: Sequence[Any], about: str, problem: TuningProblem
    ) -> Timed:
        """Of the tiles whose answer is right."""
        tried = [problem.under(section, self.gpu.family, key, tile) for tile in tiles]
        self.compile_ahead(tried)
        timed = []
        for tile, under_trial in zip(tiles, tried, strict=True):
            timed.append((measure(under_trial, self.time_us), tile))
            self.advance()
        us, tile = min(timed, key=lambda item: item[0])
        if us == float("inf"):
            raise MicroscaleError(f"No tile of {section.name} gave a right answer on {self.gpu.name}: {about}.")
        right = sorted(us for us, _ in timed if us < float("inf"))
        return Timed(tile, us, len(right), right[1] if len(right) > 1 else None)

    def measure_one(self, problem: TuningProblem) -> float:
        """Microseconds, or infinity where it is wrong."""
        self.compile_ahead([problem])
        return measure(problem, self.time_us)

    def row(self, key: Any, tile: Any, run: str, us: float | None) -> TunedTile[Any, Any]:
        """With where it comes from."""
        versions = (str(torch.__version__), str(triton.__version__))
        today = datetime.now(UTC).date().isoformat()
        said = Measurement(
            self.gpu.name, *versions, today, f"{self.command}: {run}", us if us is None else round(us, 2)
        )
        return TunedTile(key, tile, said)


class Search(Protocol):
    """Finds rows of one section."""

    @property
    def section(self) -> Section[Any, Any]: ...

    @property
    def keys(self) -> tuple[Any, ...]:
        """Of the rows that it finds."""
        ...

    @property
    def steps(self) -> int:
        """How often it calls ``advance``."""
        ...

    def quick(self) -> Search:
        """A part of it, which says that it works."""
        ...

    def rows(self, bench: Bench) -> list[TunedTile[Any, Any]]: ...


@dataclass(frozen=True)
class TileSearch:
    """The fastest tile of one case."""

    section: Section[Any, Any]
    key: Any
    """Of the row that the best tile gets, and under which candidates are on trial."""
    about: str
    tiles: Sequence[Any]
    prepare: Callable[[str], TuningProblem]
    """With tensors on this device."""

    @property
    def keys(self) -> tuple[Any, ...]:
        return (self.key,)

    @property
    def steps(self) -> int:
        return len(self.tiles)

    def quick(self) -> TileSearch:
        step = max(1, len(self.tiles) // QUICK_TILES)
        return replace(self, tiles=self.tiles[::step][:QUICK_TILES])

    def rows(self, bench: Bench) -> list[TunedTile[Any, Any]]:
        best = bench.fastest(self.section, self.key, self.tiles, self.about, self.prepare(bench.device))
        return [bench.row(self.key, best.tile, f"{self.about}; {best.text}", best.us)]
