"""``microscale quality``: every choice against float32, as rows. How they are shown: ``report``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from microscale.engine.config import EngineConfig
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare
from microscale.engine.runner import Model
from microscale.errors import BadSetting, Unsupported
from microscale.planning.precision import PRECISIONS, Precision, make_precision
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.measure import (
    BATCH,
    MAX_TOKENS,
    Distance,
    check_answers,
    distance,
    greedy,
    greedy_after,
    log_probabilities,
)
from microscale_lab.quality.tasks import Encoded, HeldOutTask, encode

if TYPE_CHECKING:
    from torch import Tensor

LAYERS = ("qkv", "o", "lm_head", "embed")
"""Layers of gpt-oss that are not in four bits already. Its experts, which are, are rounded once more in NVFP4."""
FORMATS = ("fp8", "mxfp8", "mxfp4", "nvfp4")
NVFP4 = tuple(f"{layer}=nvfp4" for layer in ("qkv", "o", "experts"))
"""As checkpoints in NVFP4 have it: lm_head and embeddings stay as they are."""
REFERENCE = "float32"


@dataclass(frozen=True)
class PrecisionChoice:
    """One way to hold and compute a model."""

    name: str
    precision: Precision
    dtype: str = "auto"
    """Activations between ops; ``auto`` is float32 on a CPU, so that a plan's weights alone are seen there, and what
    ``moe_activations`` names."""


def all_choices() -> list[PrecisionChoice]:
    """Float32 first: it is what the others are held against."""
    return [
        PrecisionChoice(REFERENCE, make_precision("exact"), "float32"),
        *(PrecisionChoice(name, make_precision(name)) for name in PRECISIONS),
        PrecisionChoice("activations=bfloat16", make_precision("exact"), "bfloat16"),
        PrecisionChoice("moe-activations=mxfp8", make_precision("exact", moe_activations="mxfp8")),
        PrecisionChoice("kv-cache=fp8", make_precision("exact", kv_cache_dtype="fp8")),
        *(
            PrecisionChoice(f"{layer}={fmt}", make_precision("exact", (f"{layer}={fmt}",)))
            for layer in LAYERS
            for fmt in FORMATS
        ),
        PrecisionChoice("experts=nvfp4", make_precision("exact", ("experts=nvfp4",))),
        PrecisionChoice("experts=nvfp4, moe-activations=nvfp4", make_precision("exact", NVFP4[2:], "nvfp4")),
        PrecisionChoice("nvfp4", make_precision("exact", NVFP4)),
    ]


def choose(names: Sequence[str]) -> list[PrecisionChoice]:
    """Those of these names, float32 always among them; all without names."""
    known = {choice.name: choice for choice in all_choices()}
    for name in names:
        if name not in known:
            raise BadSetting(f"Unknown choice {name!r}; known are {', '.join(known)}.")
    return [choice for name, choice in known.items() if not names or name in names or name == REFERENCE]


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
    """Rows as they are measured, float32 first. Each choice loads the model again; one is loaded at a time."""
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
        found = check_answers(encoded, answers, chat_format)
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
