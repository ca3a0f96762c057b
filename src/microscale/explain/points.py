"""Which speeds ``explain`` tells: decoding at three batch sizes and two contexts, prompts, and the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from microscale.backends.decision import Plan
from microscale.backends.forecast import Forecast, total
from microscale.backends.plan import Setup
from microscale.explain.interval import interval
from microscale.explain.predict import decode_parts, predict_prompt
from microscale.hardware.known_times import Basis
from microscale.hardware.reach import reach
from microscale.hardware.whole_models import Case, Kind
from microscale.models.outline import Outline

BATCHES = (1, 8, 64)
SHORT_CONTEXT = 128
PROMPTS = (128, 2048)


@dataclass(frozen=True)
class Point:
    """Tokens per second of one case, with the range that holds them nine times in ten."""

    kind: Kind
    batch: int
    context: int
    tok_s: float
    low: float
    high: float
    ceiling: float
    """What the same bytes and operations allow any engine, by the data sheet."""
    reachable: float
    """The same at the bandwidth that reading reaches."""
    basis: Basis
    us: float
    """Of one step, or of the prompt: then it is the time to the first token."""

    def to_json(self) -> dict[str, Any]:
        context = "context" if self.kind is Kind.DECODE else "tokens"
        figures = {"tok_s": self.tok_s, "low": self.low, "high": self.high, "ceiling_tok_s": self.ceiling}
        said: dict[str, Any] = {"batch": self.batch, context: self.context}
        said |= {name: round(value, 1) for name, value in figures.items()}
        if self.kind is Kind.PREFILL:
            said["first_token_ms"] = round(self.us / 1e3, 1)
        return said | {"basis": self.basis.value}


def preset_name(model: str) -> str:
    """``openai/gpt-oss-20b`` and a folder of that name are the preset as far as speed goes."""
    return model.rstrip("/").rpartition("/")[2]


def make_points(
    outline: Outline, plan: Plan, setup: Setup, batches: Sequence[int], contexts: Sequence[int],
    step_tokens: int, fits: Callable[[int, int], bool],
) -> list[Point]:  # fmt: skip
    """Decoding wherever ``fits`` says that so many sequences of so many tokens fit, then prompts."""
    found = []
    for context in contexts:
        for batch in batches:
            if fits(batch, context):
                parts = total([part.forecast for part in decode_parts(outline, plan, setup, batch, context)])
                found.append(_point(Kind.DECODE, parts, outline.name, setup, batch, context, batch))
    for tokens in sorted({*(size for size in PROMPTS if size <= outline.max_context), max(contexts)}):
        if fits(1, tokens):
            parts = predict_prompt(outline, plan, setup, tokens, step_tokens)
            found.append(_point(Kind.PREFILL, parts, outline.name, setup, 1, tokens, tokens))
    return found


def _point(kind: Kind, parts: Forecast, model: str, setup: Setup, batch: int, context: int, tokens: int) -> Point:
    case = Case(preset_name(model), str(setup.precision), kind, batch, context)
    time = interval(parts, case, setup.gpu)
    ceiling = tokens / parts.floor_us * 1e6
    tok_s, low, high = (tokens / us * 1e6 for us in (time.us, time.high_us, time.low_us))
    slower = reach(setup.gpu).gbs / setup.gpu.bandwidth_gbs
    memory_bound = parts.bytes / (setup.gpu.bandwidth_gbs * 1e3) > 0.9 * parts.floor_us
    reachable = ceiling * slower if memory_bound else ceiling
    return Point(kind, batch, context, tok_s, low, high, ceiling, reachable, time.basis, time.us)
