"""``microscale quality``: every choice against float32, as rows, a table and JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from torch import Tensor

from microscale.engine.load import LoadOptions, load_model
from microscale.engine.memory import Workload
from microscale.errors import Unsupported
from microscale.quality.choices import REFERENCE, Choice
from microscale.quality.encoded import Encoded, encode
from microscale.quality.measure import BATCH, MAX_TOKENS, Distance, accuracy, distance, log_probabilities
from microscale.quality.tasks import Task
from microscale.text.harmony_render import HarmonyRenderer
from microscale.text.tokenizer import Tokenizer

BAR = 20
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class Row:
    """One choice. A choice that cannot run here has only its reason."""

    choice: str
    accuracy: float | None = None
    distance: Distance | None = None
    by_task: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class Question:
    """What is compared, on which model."""

    model: str
    tokenizer: Tokenizer
    tasks: Sequence[Task]
    choices: Sequence[Choice]
    device: str = "auto"
    offline: bool = False
    max_tokens: int = MAX_TOKENS


def run(question: Question, on_answers: Callable[[int], None] = lambda count: None) -> Iterator[Row]:
    """Rows as they are measured, float32 first. Each choice loads the model anew; one is loaded at a time."""
    renderer = HarmonyRenderer(question.tokenizer)
    encoded = [encode(task, renderer) for task in question.tasks]
    exact: list[Tensor] = []
    for choice in question.choices:
        try:
            model = load_model(
                LoadOptions(
                    question.model,
                    device=question.device,
                    dtype=choice.dtype,
                    precision=choice.precision,
                    workload=Workload(context=_longest(encoded, question.max_tokens), sequences=BATCH),
                    offline=question.offline,
                )
            )
        except Unsupported as error:
            on_answers(len(encoded))
            yield Row(choice.name, reason=str(error))
            continue
        if choice.name == REFERENCE:
            exact = list(log_probabilities(model, encoded))
        away = distance(exact if choice.name == REFERENCE else log_probabilities(model, encoded), exact, encoded)
        answers = accuracy(model, encoded, renderer.tokens, question.max_tokens, on_answers)
        by_task = {task: answers.of(task) for task in sorted(answers.asked)}
        yield Row(choice.name, answers.share, away, by_task)


def _longest(encoded: Sequence[Encoded], max_tokens: int) -> int:
    return max(len(item.prompt) + max(len(item.answer), max_tokens) for item in encoded)


def table(rows: Sequence[Row]) -> str:
    """Bars show the divergence on a logarithmic scale: from 1e-6 nats (empty) to 1 (full)."""
    width = max(len(row.choice) for row in rows)
    lines = [f"{'choice':<{width}} {'accuracy':>9} {'loss':>8} {'KL':>9} {'top-1':>7}  divergence"]
    for row in rows:
        if row.distance is None or row.accuracy is None:
            # The whole reason, with every implementation's, is in the JSON.
            lines.append(f"{row.choice:<{width}} not here: {(row.reason or '').split(';')[0]}")
            continue
        away = row.distance
        figures = f"{100 * row.accuracy:>8.1f}% {away.loss:>8.4f} {away.kl:>9.2e} {100 * away.top1:>6.2f}%"
        lines.append(f"{row.choice:<{width}} {figures}  {bar(away.kl)}".rstrip())
    return "\n".join(lines)


def bar(kl: float) -> str:
    """A bar of at most ``BAR`` characters."""
    share = min(1.0, max(0.0, 1 + math.log10(max(kl, 1e-12)) / 6))
    eighths = round(share * BAR * 8)
    return EIGHTHS[-1] * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    return [asdict(row) for row in rows]
