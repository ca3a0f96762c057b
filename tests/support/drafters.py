"""Drafters whose luck is known: what they propose is the model's own output, or nonsense, or a mixture of both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from microscale.engine.speculation.drafter import Context, Launched
from microscale.engine.speculation.length import Length
from microscale.engine.speculation.speculation import Speculation


class KnowingDrafter:
    """Knows what the model says after some tokens, and says it, or something else."""

    def __init__(self, after: Callable[[Sequence[int], int], Sequence[int]], vocab: int, luck: float = 1.0) -> None:
        """``after(tokens, count)``: the tokens that come next. ``luck``: how often a token is the right one."""
        self._after = after
        self._vocab = vocab
        self._luck = luck
        self._chance = random.Random(0)
        self.known: set[str] = set()
        """Requests that it was asked about and has not forgotten."""

    def observe(self, step: Launched, most: int) -> None:
        pass

    def expects(self, context: Context) -> bool:
        return True

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        self.known |= {context.request.request_id for context in contexts}
        return [self._propose(context) for context in contexts]

    def _propose(self, context: Context) -> list[int]:
        right = self._after(context.request.tokens, context.most)
        return [
            token if self._chance.random() < self._luck else (token + 1 + self._chance.randrange(3)) % self._vocab
            for token in right
        ]

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)


class Uneven(Length):
    """Draft lengths that differ from request to request and from step to step."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._chance = random.Random(1)
        self.landings: list[tuple[int, int]] = []

    def choose(self, requests: Sequence[object], sequences: int) -> Sequence[int]:
        return [self._chance.randint(0, self._most) for _ in requests]

    def landed(self, request: object, drafted: int, accepted: int) -> None:
        self.landings.append((drafted, accepted))


def replaying(
    outputs: Sequence[tuple[Sequence[int], Sequence[int]]], vocab: int, most: int, luck: float = 1.0
) -> Speculation:
    """Drafts from what the prompts became without drafts: pairs of a prompt and its output."""
    known = {tuple(prompt): list(output) for prompt, output in outputs}

    def after(tokens: Sequence[int], count: int) -> Sequence[int]:
        for prompt, output in known.items():
            done = len(tokens) - len(prompt)
            if (
                0 <= done <= len(output)
                and tuple(tokens[: len(prompt)]) == prompt
                and list(tokens[len(prompt) :]) == output[:done]
            ):
                return output[done : done + count]
        return []

    return Speculation(KnowingDrafter(after, vocab, luck), most)
