"""What ``microscale tune`` runs for split-KV: how the keys of a sequence that decodes are split, by head size and
KV format.

Four figures, one after the other, each measured with those before it. Splits of an SM: many sequences with long
contexts, which fill the card. Keys of a split: one sequence with a short context. Then two borders: up to how many
splits the last program adds them up itself, and up to how many sequences heads come straight from the projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles.attention import (
    EVERY,
    HEAD_DIMS,
    SPLIT_SECTION,
    Heads,
    Kv,
    SplitKv,
    split_kv,
)
from microscale.hardware.tiles.tuned import Section, TunedTile, trial
from microscale.kernels.attention.paths import most_splits, tile_of
from microscale_lab.kernel_bench.attention import AttentionInput, Layer
from microscale_lab.tune import candidates
from microscale_lab.tune.attention import DECODE_CONTEXT, DECODE_SEQUENCES, LAYER_OF, FromHeads, fused, plain
from microscale_lab.tune.crossing import Border, Crossing, Sides, find_border
from microscale_lab.tune.job import Bench, TuningProblem, together

SHORT_CONTEXTS = (160, 1024)
SPLITS = (2, 4, 8, 12, 16, 24, 32, 48, 64)
SPLIT_SEQUENCES = (1, 8)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
FUSED_CONTEXT = 576
TABLE_PAGES = 1 << 13
"""Of a long context, beyond which a window decides how many splits there are."""
CANDIDATES: dict[str, Callable[[SplitKv], list[SplitKv]]] = {
    "splits_per_sm": candidates.splits_per_sm,
    "least_keys": candidates.least_keys,
}


def jobs(gpu: Gpu, quick: bool) -> Iterator[SplitJob]:
    for head_dim, kv in list(product(HEAD_DIMS, Kv))[: 1 if quick else None]:
        yield SplitJob(head_dim, gpu, kv)


@dataclass(frozen=True)
class SplitJob:
    """All figures of one head size and KV format."""

    head_dim: int
    gpu: Gpu
    kv: Kv = Kv.BF16
    few: bool = False

    @property
    def section(self) -> Section[Any, Any]:
        return SPLIT_SECTION

    @property
    def key(self) -> Heads:
        return Heads(self.head_dim, self.kv)

    @property
    def keys(self) -> tuple[Heads, ...]:
        return (self.key,)

    @property
    def layer(self) -> Layer:
        return LAYER_OF[self.head_dim]

    @property
    def steps(self) -> int:
        start = self._start
        tiles = sum(len(self._tiles(name, start)) for name in CANDIDATES)
        sizes = [self._merges(start).sizes, self._fuses(start).sizes if self._fused else ()]
        return tiles + sum(map(len, sizes))

    def quick(self) -> SplitJob:
        return replace(self, few=True)

    def rows(self, bench: Bench) -> list[TunedTile[Any, Any]]:
        found, first = self._best(bench, "splits_per_sm", self._start, self._long(bench.device))
        found, second = self._best(bench, "least_keys", found, self._short(bench.device))
        inside = find_border(self._merges(found), bench)
        found = replace(found, merged_inside=inside.last_below or 0)
        in_one = find_border(self._fuses(found), bench) if self._fused else _NEVER_FUSED
        found = replace(found, fused_sequences=in_one.last_below or 0)
        said = "; ".join((first, second, inside.text, in_one.text))
        return [bench.row(self.key, found, said, None)]

    @property
    def _start(self) -> SplitKv:
        return split_kv(self.head_dim, self.gpu, self.kv)

    def _case(self, sequences: int, context: int) -> AttentionInput:
        return AttentionInput(self.layer, sequences, context, fp8=self.kv is Kv.FP8)

    @property
    def _fused(self) -> bool:
        return self.gpu.has(Feature.PDL)

    def _tiles(self, name: str, start: SplitKv) -> list[SplitKv]:
        found = CANDIDATES[name](start)
        return found[:: max(1, len(found) - 1)] if self.few else found

    def _best(self, bench: Bench, name: str, start: SplitKv, work: tuple[str, TuningProblem]) -> tuple[SplitKv, str]:
        """With one figure changed to the fastest; the splits of a short context are added up in the better way."""
        about, problem = work
        tiles = self._tiles(name, start)
        best = bench.fastest(SPLIT_SECTION, self.key, tiles, about, problem)
        value = getattr(best.tile, name)
        return replace(start, **{name: value}), f"{about}: {best.us:.1f} us with {name} {value}, {best.text}"

    def _long(self, device: str) -> tuple[str, TuningProblem]:
        case = self._case(DECODE_SEQUENCES, DECODE_CONTEXT)
        return case.name, plain(case, self.gpu)(device)

    def _short(self, device: str) -> tuple[str, TuningProblem]:
        """As a single sequence decodes on this card."""
        cases = [self._case(1, context) for context in SHORT_CONTEXTS]
        prepare = fused if self._fused else plain
        name = f"{cases[0].name} and {' and '.join(str(case.context) for case in cases[1:])}"
        return name, together([prepare(case, self.gpu)(device) for case in cases])

    def _under(self, problem: TuningProblem, tile: SplitKv) -> TuningProblem:
        return problem.under(SPLIT_SECTION, self.gpu.family, self.key, tile)

    def _merges(self, found: SplitKv) -> Crossing:
        """The last program adds up, or a kernel of its own."""
        spec = self._case(1, 1).spec
        spec = replace(spec, batch=replace(spec.shape, kv_fp8=self.kv is Kv.FP8))
        tile = tile_of(spec, self.gpu, spec.shape.kv_fp8, decode=True)
        keys = tile.block_n * found.least_blocks(tile)
        sizes: Sequence[int] = SPLITS
        if spec.window is not None:
            with trial(SPLIT_SECTION, self.gpu.family, self.key, found):
                most = max(2, most_splits(spec, TABLE_PAGES, tile, self.gpu, fused=False))
            sizes = sorted({*(size for size in SPLITS if size < most), most})

        def prepare(device: str, splits: int) -> list[Sides]:
            cases = [self._case(sequences, splits * keys) for sequences in SPLIT_SEQUENCES]
            problems = [plain(case, self.gpu)(device) for case in cases]
            inside, apart = (replace(found, merged_inside=limit) for limit in (EVERY, 0))
            return [Sides(self._under(problem, inside), self._under(problem, apart)) for problem in problems]

        about = f"{self.layer[0]}, decode, {' and '.join(map(str, SPLIT_SEQUENCES))} sequences, {self.kv} keys"
        crossing = Crossing(about, "splits", "in one launch", "with a merge", sizes, prepare)
        return crossing.quick() if self.few else crossing

    def _fuses(self, found: SplitKv) -> Crossing:
        """Decode from the projection in one launch, or norms, rotation and KV write before it."""

        def prepare(device: str, sequences: int) -> list[Sides]:
            heads = FromHeads.of(self._case(sequences, FUSED_CONTEXT), device)
            one = heads.problem(lambda kv: heads.in_one_launch(self.gpu, kv))
            two = heads.problem(lambda kv: heads.apart(self.gpu, kv))
            tile = replace(found, fused_sequences=EVERY)
            return [Sides(self._under(one, tile), self._under(two, tile))]

        about = f"{self.layer[0]}, decode from the projection at {FUSED_CONTEXT}, {self.kv} keys"
        crossing = Crossing(about, "sequences", "in one launch", "apart", SEQUENCES, prepare)
        return crossing.quick() if self.few else crossing


_NEVER_FUSED = Border(None, None, "no decode from the projection without programmatic dependent launch")
