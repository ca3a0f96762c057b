"""Drafters whose luck is known: what they propose is the model's own output, or nonsense, or a mixture of both."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from microscale.engine.request import Request
from microscale.engine.speculation.drafter import Context, LaunchedStep
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

    def observe(self, step: LaunchedStep, most: int) -> None:
        pass

    def expects(self, context: Context) -> bool:
        return True

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        self.known |= {context.request.request_id for context in contexts}
        return [self._propose(context) for context in contexts]

    def _propose(self, context: Context) -> list[int]:
        return [self._guess(token) for token in self._after(context.request.tokens, context.most)]

    def _guess(self, token: int) -> int:
        return token if self._chance.random() < self._luck else (token + 1 + self._chance.randrange(3)) % self._vocab

    def forget(self, request_id: str) -> None:
        self.known.discard(request_id)


class AheadDrafter(KnowingDrafter):
    """The same with drafts on the device, as a draft head has them: made behind each step, before it is read."""

    def __init__(self, after: Callable[[Sequence[int], int], Sequence[int]], vocab: int, luck: float = 1.0) -> None:
        super().__init__(after, vocab, luck)
        self._guesses: dict[str, list[int]] = {}

    def observe(self, step: LaunchedStep, most: int) -> None:
        self._guesses = {}
        if step.tokens is None:
            return
        drawn, ahead = step.tokens.tolist(), step.ahead
        for at, work in enumerate(step.schedule):
            row = step.first_rows.get(work.request.request_id)
            if row is None:
                continue
            moved = 0 if ahead is None else int(ahead.accepted[at])
            drafts = work.drafts if ahead is None else ahead.drafts[at].tolist()[: len(work.drafts)]
            pairs = zip(drafts, drawn[row:], strict=False)
            accepted = next((n for n, (draft, token) in enumerate(pairs) if draft != token), len(drafts))
            known = work.first + work.count - len(work.drafts) + moved + accepted + 1
            prompt = work.request.prompt
            whole = [*prompt, *self._after(prompt, known + most - len(prompt))]
            assert whole[known - 1] == drawn[row + accepted]
            self._guesses[work.request.request_id] = [self._guess(token) for token in whole[known:]]

    def drafts_ahead(self, requests: Sequence[Request], most: int) -> Tensor | None:
        if any(request.request_id not in self._guesses for request in requests):
            return None
        return torch.tensor([self._guesses[request.request_id][:most] for request in requests])

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._guesses.pop(request_id, None)


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
