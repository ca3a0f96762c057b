"""``microscale quality``: every choice against float32, as rows. How they are shown: ``report``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from microscale.engine.config import EngineConfig
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.engine.runner import Model
from microscale.errors import Unsupported
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.choices import REFERENCE, PrecisionChoice
from microscale_lab.quality.encoded import Encoded, encode
from microscale_lab.quality.measure import (
    BATCH,
    MAX_TOKENS,
    Distance,
    distance,
    greedy,
    greedy_after,
    judge,
    log_probabilities,
)
from microscale_lab.quality.tasks import HeldOutTask

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ChoiceResult:
    """One choice. A choice that cannot run here has only its reason."""

    choice: str
    accuracy: float | None = None
    distance: Distance | None = None
    by_task: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """What is compared, on which model."""

    model: str
    tokenizer: Tokenizer
    tasks: Sequence[HeldOutTask]
    choices: Sequence[PrecisionChoice]
    device: str = "auto"
    offline: bool = False
    max_tokens: int = MAX_TOKENS


def run(question: Comparison, on_answers: Callable[[int], None] = lambda count: None) -> Iterator[ChoiceResult]:
    """Rows as they are measured, float32 first. Each choice loads the model anew; one is loaded at a time."""
    chat_format = chat_format_for(question.tokenizer)
    encoded = [encode(task, chat_format) for task in question.tasks]
    exact: list[Tensor] = []
    said: list[list[int]] = []
    for choice in question.choices:
        try:
            options = EngineConfig(
                question.model,
                device=question.device,
                dtype=choice.dtype,
                max_model_len=_longest(encoded, question.max_tokens),
                max_num_seqs=BATCH,
                offline=question.offline,
                **choice.precision.options(),
            )
            model = load(prepare(options))
        except Unsupported as error:
            on_answers(len(encoded))
            yield ChoiceResult(choice.name, reason=str(error))
            continue
        if choice.name == REFERENCE:
            exact = list(log_probabilities(model, encoded))
            said = answers = greedy(model, encoded, question.max_tokens, on_answers)
            away = distance(exact, exact, encoded)
        else:
            away = distance(log_probabilities(model, encoded), exact, encoded)
            answers = _answers(model, encoded, said, question.max_tokens, on_answers)
        found = judge(encoded, answers, chat_format)
        by_task = {task: found.of(task) for task in sorted(found.asked)}
        yield ChoiceResult(choice.name, found.share, away, by_task)


def _answers(
    model: Model,
    encoded: Sequence[Encoded],
    said: Sequence[list[int]],
    max_tokens: int,
    on_answers: Callable[[int], None],
) -> list[list[int]]:
    """A GPU may run prompts with other kernels than single tokens, and decodes fast: there nothing is taken over."""
    if model.device.type != "cpu":
        return greedy(model, encoded, max_tokens, on_answers)
    return greedy_after(model, encoded, said, max_tokens, on_answers)


def _longest(encoded: Sequence[Encoded], max_tokens: int) -> int:
    return max(len(item.prompt) + max(len(item.answer), max_tokens) for item in encoded)
