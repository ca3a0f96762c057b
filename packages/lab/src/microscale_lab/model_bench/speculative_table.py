"""What ``bench --speculative-acceptance`` measured: rows, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from microscale_lab.model_bench.chosen import ChosenStep, shares, shares_line, steps_as_json

LENGTHS = (2.0, 2.5, 3.0)
"""Tokens of a step, as publishers of draft heads name them."""


@dataclass(frozen=True)
class DraftRow:
    sequences: int
    drafts: int | str
    step_ms: float
    ratio: float | None
    """Against a step without drafts, where that was measured."""
    predicted_ms: float | None
    """What ``explain`` says."""
    experts: float | None
    tokens_a_step: float
    """Of a sequence: what the acceptance gives on average, with the lengths that were chosen."""
    tok_s: float
    tok_s_at: dict[str, float | None]
    """If a step gave each sequence 2, 2.5, 3 tokens."""
    draft_length: float
    """Mean over the steps."""
    steps: tuple[ChosenStep, ...] = ()
    """With ``AUTO``, those in which it learned among them."""

    @property
    def chosen(self) -> dict[int, float]:
        """How often each length was chosen in the steps that count."""
        return shares([step for step in self.steps if step.counts])


def best(rows: Sequence[DraftRow]) -> dict[int, DraftRow]:
    """Of each number of sequences, the fixed number of drafts that gives most tokens a second."""
    found: dict[int, DraftRow] = {}
    for row in rows:
        kept = found.get(row.sequences)
        if isinstance(row.drafts, int) and (kept is None or row.tok_s > kept.tok_s):
            found[row.sequences] = row
    return found


def header() -> str:
    at = "".join(f"{f'at {n:g}':>9}" for n in LENGTHS)
    return f"{'seq':>4} {'K':>5} {'step ms':>8} {'x':>5} {'explain':>8} {'experts':>7} {'tok/s':>9}{at}"


def line(row: DraftRow) -> str:
    def shown(value: float | None, width: int, digits: int) -> str:
        return f"{'' if value is None else f'{value:.{digits}f}':>{width}}"

    figures = " ".join((shown(row.ratio, 5, 2), shown(row.predicted_ms, 8, 2), shown(row.experts, 7, 1)))
    at = "".join(shown(rate, 9, 1) for rate in row.tok_s_at.values())
    found = f"{row.sequences:>4} {row.drafts!s:>5} {row.step_ms:>8.2f} {figures} {row.tok_s:>9.1f}{at}".rstrip()
    return found + (f"\n{shares_line(row.chosen)}" if row.steps else "")


def summary(rows: Sequence[DraftRow], acceptance: float) -> str:
    """The best number of drafts for each number of sequences, against none."""
    parts = []
    for sequences, row in best(rows).items():
        alone = next((each for each in rows if each.sequences == sequences and each.drafts == 0), None)
        gain = "" if alone is None else f", {row.tok_s / alone.tok_s:.2f} x"
        parts.append(f"{sequences} sequences: K = {row.drafts}{gain}")
    return f"best at an acceptance of {acceptance:g}: {'; '.join(parts)}"


def as_json(rows: Sequence[DraftRow]) -> list[dict[str, object]]:
    chosen = {id(row) for row in best(rows).values()}
    return [_told(row) | {"best": id(row) in chosen} for row in rows]


def _told(row: DraftRow) -> dict[str, object]:
    """With ``AUTO`` how often each length was chosen, and all steps."""
    told = asdict(replace(row, steps=()))
    del told["steps"]
    return told | {"chosen": row.chosen, "steps": steps_as_json(row.steps)} if row.steps else told
