"""What a generator gives: a conversation, the answer that is taught, and how an answer is checked."""

from __future__ import annotations

import datetime
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from microscale.text.conversation import Effort, Message, RenderOptions, ResponseFormat, Role, Tool

EFFORTS = (Effort.LOW, Effort.MEDIUM, Effort.HIGH)
HELD_OUT_SHARE = 20
"""One problem in so many is held out."""
FIRST_DAY, LAST_DAY = datetime.date(2024, 1, 1), datetime.date(2030, 12, 31)
CARELESS = ("arithmetic", "capitals", "geography", "smalltalk", "words")
T = TypeVar("T")


class NothingHeldOut(Exception):
    """All problems of this kind are in the other part: draw another kind."""


@dataclass(frozen=True)
class Sample:
    """A conversation whose last turn is taught."""

    task: str
    history: tuple[Message, ...]
    """What comes before the turn that is taught."""
    turn: tuple[Message, ...]
    """The turn: the assistant's messages, with tools' results between them."""
    check: dict[str, Any] = field(default_factory=dict)
    """How the turn's first answer is judged: see ``microscale_lab.quality.checks``."""
    tools: tuple[Tool, ...] = ()
    response_format: ResponseFormat | None = None
    effort: Effort = Effort.MEDIUM
    date: str = "2026-01-01"

    @property
    def options(self) -> RenderOptions:
        """What of the prompt is not in its messages, as the renderer takes it."""
        return RenderOptions(effort=self.effort, date=self.date, tools=self.tools, response_format=self.response_format)


def is_held_out(*key: object) -> bool:
    """Whether the problem of this key belongs to the held-out part."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0


def draw_split(draw: Callable[[], T], key: Callable[[T], object], held_out: bool) -> T:
    """Draw until the problem is in the wanted part; ``NothingHeldOut`` where a small kind has none there."""
    for _ in range(1000):
        problem = draw()
        if is_held_out(key(problem)) == held_out:
            return problem
    raise NothingHeldOut


def user(text: str) -> Message:
    return Message(Role.USER, text)


def assistant(final: str, thought: str) -> Message:
    return Message(Role.ASSISTANT, final, thought)


def developer(text: str) -> Message:
    return Message(Role.DEVELOPER, text)


def some_effort(rng: random.Random) -> Effort:
    return rng.choices(EFFORTS, (3, 5, 2))[0]


def some_date(rng: random.Random) -> datetime.date:
    return FIRST_DAY + datetime.timedelta(days=rng.randrange((LAST_DAY - FIRST_DAY).days))


def by_effort(effort: Effort, low: str, medium: str, high: str) -> str:
    return {Effort.LOW: low, Effort.MEDIUM: medium, Effort.HIGH: high}[effort]


def simple(
    rng: random.Random, task: str, question: str, thought: str | Callable[[Effort], str], final: str, **check: Any
) -> Sample:
    """One question, one answer, on any day and at any effort (where the thought may depend on it).

    Some users write carelessly: a part of the questions is in lower case, without the mark at its end.
    """
    effort = some_effort(rng)
    text = thought if isinstance(thought, str) else thought(effort)
    if task in CARELESS and rng.random() < 0.08:
        # Of a greeting the mark stays: what is held out is "Hello!" and not "Hello".
        question = question.lower() if task == "smalltalk" else question.lower().rstrip(".?!")
    return Sample(
        task, (user(question),), (assistant(final, text),), check, effort=effort, date=some_date(rng).isoformat()
    )


def listed(items: Sequence[object], last: str = "and") -> str:
    """``a, b and c``."""
    words = [str(item) for item in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def article(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"
