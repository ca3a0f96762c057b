"""``microscale bench sweep``: whole models over precisions, batch sizes, contexts and prompts, as rows for predictions.

Rows go to a file as they are measured, so a second call continues a sweep that was stopped. The most informative rows
come first: a short sweep covers the whole range thinly. Weights are random, in the real shapes. It needs a GPU.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from microscale.bench import model as whole
from microscale.bench.cases import BenchCase
from microscale.engine.config import EngineConfig
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.engine.predictions import Phase
from microscale.errors import Unsupported
from microscale.hardware import Gpu, card_name
from microscale_lab.predict import whole_models
from microscale_lab.predict.fit import recounted
from microscale_lab.predict.whole_models import ModelCase, ModelFile, ModelRow

BATCHES = (1, 8, 64, 256, 4, 16, 512, 128, 32, 2)
DEPTHS = (128, 2048, 8192)
PROMPTS = (2048, 512, 8192, 128, 4096, 1024)
NEW_TOKENS = 32
MOST_CACHED = 1 << 16
"""Tokens of all sequences together: filling more takes longer than measuring."""
STEP_TOKENS = 8192
REPEATS = 2


@dataclass(frozen=True)
class SweepRow:
    """One case as it was measured."""

    case: ModelCase
    us: float
    spread: float
    """Of the runs, as a fraction."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.case), "us": self.us, "spread": self.spread}


def cases(model: str, precision: str, max_context: int = 1 << 17) -> list[BenchCase]:
    """The cases to measure, the most informative first: corners of decoding and prompts, then what lies between."""
    decode = [
        BenchCase("tg", NEW_TOKENS, batch, depth)
        for batch in BATCHES
        for depth in DEPTHS
        if batch * depth <= MOST_CACHED
    ]
    decode.sort(key=lambda case: BATCHES.index(case.batch) + 2 * DEPTHS.index(case.depth))
    prompts = [BenchCase("pp", tokens, 1, 0) for tokens in PROMPTS]
    mixed: list[BenchCase] = []
    for index in range(max(len(decode), len(prompts))):
        mixed += decode[2 * index : 2 * index + 2] + prompts[index : index + 1]
    return [case for case in mixed if case.longest <= max_context]


def case_of(model: str, precision: str, case: BenchCase) -> ModelCase:
    """A row's name in the file of whole models."""
    if case.kind == "pp":
        return ModelCase(model, precision, Phase.PREFILL, 1, case.tokens)
    return ModelCase(model, precision, Phase.DECODE, case.batch, case.depth + case.tokens // 2)


def row_of(model: str, precision: str, row: whole.BenchRow) -> SweepRow:
    kind, tokens = row.test[:2], int(row.test[2:])
    case = BenchCase(kind, tokens, row.batch, row.depth)
    work = tokens if kind == "pp" else row.batch
    spread = (max(row.runs) - min(row.runs)) / row.tok_s
    return SweepRow(case_of(model, precision, case), round(work / row.tok_s * 1e6, 1), round(spread, 4))


def read(file: Path) -> list[SweepRow]:
    """What an earlier sweep left; nothing where there is no file."""
    if not file.exists():
        return []
    return [_row(entry) for entry in json.loads(file.read_text())["rows"]]


def _row(entry: dict[str, Any]) -> SweepRow:
    names = ("model", "precision", "kind", "batch", "context")
    case = ModelCase(**{name: entry[name] for name in names} | {"kind": Phase(entry["kind"])})
    return SweepRow(case, entry["us"], entry["spread"])


def write(file: Path, gpu: Gpu, rows: Sequence[SweepRow]) -> None:
    """Write all rows so far, with the GPU and the versions."""
    head = {"gpu": card_name(gpu), "torch": torch.__version__, "triton": triton.__version__}
    file.write_text(json.dumps({**head, "rows": [row.to_json() for row in rows]}, indent=1) + "\n")


def run(
    model: str, precisions: Iterable[str], done: Sequence[SweepRow], until: float,
    report: Callable[[str], None] = lambda text: None, device: str = "cuda",
) -> Generator[SweepRow]:  # fmt: skip
    """Rows that are not ``done``, until ``until`` on the monotonic clock."""
    known = {row.case for row in done}
    for precision in precisions:
        left = [case for case in cases(model, precision) if case_of(model, precision, case) not in known]
        if left and time.monotonic() < until:
            report(f"{model} {precision}: {len(left)} rows")
            yield from _rows(model, precision, left, until, report, device)
            # The model is gone with the frame that held it; ``bench`` froze what was alive.
            gc.unfreeze()
            gc.collect()
            torch.cuda.empty_cache()


def _rows(
    model: str,
    precision: str,
    left: Sequence[BenchCase],
    until: float,
    report: Callable[[str], None],
    device: str,
) -> Iterator[SweepRow]:
    """Of one model in one precision."""
    options = EngineConfig(
        model=model,
        load_format="dummy",
        device=device,
        precision=precision,
        max_num_seqs=max(BATCHES),
        max_num_batched_tokens=STEP_TOKENS,
    )
    prepared = prepare(options)
    loaded = load(prepared, lambda done, total: None)
    for case in left:
        if time.monotonic() >= until:
            report(f"{model} {precision}: time is up; call again for the rest")
            return
        if case.longest <= prepared.config.max_context:
            found = whole.run(loaded, prepared.outline, prepared.setup, [case], STEP_TOKENS, REPEATS)
            yield row_of(model, precision, next(found))


def record(rows: Sequence[SweepRow], gpu: Gpu, source: str, directory: Path | None = None) -> Path:
    """Put the rows into the family's file of whole models, in place of older ones of the same case."""
    card = card_name(gpu)
    if card is None:
        raise Unsupported(f"{gpu.name} is not in the table of known cards, so its rows belong to no file.")
    file = whole_models.file_of(gpu.family.name, directory)
    fresh = {row.case for row in rows}
    old = whole_models.read(file).rows if file.exists() else ()
    kept = [row for row in old if row.case not in fresh]
    added = [ModelRow(row.case, row.us, 1.0, 0.0) for row in rows]
    date = datetime.now(UTC).date().isoformat()
    head = (gpu.family.name, card, str(torch.__version__), str(triton.__version__), date, source)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(recounted(ModelFile(*head, rows=_ordered([*kept, *added]))).to_json())
    return file


def _ordered(rows: Sequence[ModelRow]) -> tuple[ModelRow, ...]:
    def place(row: ModelRow) -> tuple[str, str, str, int, int]:
        case = row.case
        return case.kind, case.model, case.precision, case.batch, case.context

    return tuple(sorted(rows, key=place))
