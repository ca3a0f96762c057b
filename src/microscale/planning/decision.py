"""What was chosen, what was not, and why: as records, as text, as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Rejected:
    """An implementation that will not run, or a format that a layer is not held in, and the reason in one clause."""

    name: str
    reason: str


@dataclass(frozen=True)
class PathSpan:
    """Neighbouring batch sizes that one path of an implementation runs."""

    form: str
    """The kind of batch or call: ``decode``, ``prefill`` …; empty where there is one."""
    first: int
    last: int
    path: str | None
    """``None``: no path does, and the model takes the ops apart (a fused form)."""
    rejected: tuple[Rejected, ...]
    """The other paths, and why not, at the first of the sizes."""


@dataclass(frozen=True)
class Decision:
    """Who runs one op of one layer kind for up to ``tokens`` tokens."""

    op: str
    layer: str
    tokens: int
    chosen: str
    rejected: tuple[Rejected, ...]
    predicted_us: float
    tuned: bool = False
    """The prediction rests on a measurement on this family, not on the implementation's stated efficiency."""
    spec: Any = None
    """The spec as the chosen implementation runs it: with the weights' format and the activations of the decision."""
    find_paths: Callable[[], tuple[PathSpan, ...]] = field(default=tuple, compare=False, repr=False)
    """Asks the oracle for ``path_spans``: who only binds a model does not wait for it."""

    @property
    def path_spans(self) -> tuple[PathSpan, ...]:
        """By which of its paths, for the batch sizes of this decision; none where it has one way for all of them."""
        return self.find_paths()

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "layer": self.layer,
            "tokens": self.tokens,
            "chosen": self.chosen,
            "rejected": [asdict(entry) for entry in self.rejected],
            "predicted_us": round(self.predicted_us, 3),
            "tuned": self.tuned,
            "paths": [asdict(span) for span in self.path_spans],
        }


@dataclass(frozen=True)
class Span:
    """Neighbouring batch sizes of one layer that the same implementation runs."""

    first: int
    last: int
    decisions: tuple[Decision, ...]

    @property
    def chosen(self) -> str:
        return self.decisions[0].chosen

    @property
    def tokens(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def path_spans(self) -> list[PathSpan]:
        """By which paths, form by form; those of neighbouring decisions together."""
        by_form: dict[str, list[PathSpan]] = {}
        for decision in self.decisions:
            for span in decision.path_spans:
                same = by_form.setdefault(span.form, [])
                if same and same[-1].path == span.path:
                    same[-1] = replace(same[-1], last=span.last)
                else:
                    same.append(span)
        return [span for same in by_form.values() for span in same]


@dataclass
class Plan:
    """All decisions of one model on one GPU. Made whole, or grows while a model binds its layers; then it stays."""

    decisions: dict[tuple[str, str, int], Decision] = field(default_factory=dict)

    def add(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            self.decisions.setdefault((decision.op, decision.layer, decision.tokens), decision)

    def of(self, op: str, layer: str) -> list[Decision]:
        """The decisions of one layer kind by ascending batch size; none where it was not decided."""
        return [decision for (o, name, _), decision in self.decisions.items() if (o, name) == (op, layer)]

    def layers(self) -> list[tuple[str, str]]:
        """Op and layer kind of everything decided, in the order of deciding."""
        return list(dict.fromkeys((op, layer) for op, layer, _ in self.decisions))

    def spans(self, op: str, layer: str) -> Iterator[Span]:
        """One layer's decisions, those of the same implementation together."""
        first = 1
        for _, group in groupby(self.of(op, layer), key=lambda decision: decision.chosen):
            decisions = tuple(group)
            yield Span(first, decisions[-1].tokens, decisions)
            first = decisions[-1].tokens + 1

    def table(self) -> str:
        """One short line per layer kind: who runs it, from how many tokens on."""
        rows = []
        for op, layer in self.layers():
            spans = list(self.spans(op, layer))
            # The last decision holds beyond its own batch size.
            names = [f"{span.chosen} to {span.last}" for span in spans[:-1]] + [spans[-1].chosen]
            form = getattr(spans[0].decisions[0].spec, "weight_format", "")
            rows.append(f"{layer:<18} {form:<6} {', '.join(names)}")
        return "\n".join(rows)

    def to_json(self) -> list[dict[str, Any]]:
        return [decision.to_json() for decision in self.decisions.values()]
