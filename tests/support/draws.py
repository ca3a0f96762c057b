"""Draws with drafts from a tiny model, and the exact distribution that they must have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.sampling_state import Drawn, Sampler
from support.fast_sampling import all_rows
from support.sampling import sampling_on_cpu

CPU = torch.device("cpu")
VOCAB, STOP = 6, 5
CHAIN = 2 * torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(3))
"""Logits after each token, and after none."""
LENGTH = 2
"""Tokens of a request whose joint distribution is compared."""
GRAMMAR = "start: (/[abc]/ /[cde]/ | /[de]/ /[ab]/) <|stop|>"
LETTERS = Vocabulary([*(letter.encode() for letter in "abcde"), b"<|stop|>"], [STOP])


def new_sampler(*, fast: bool = False) -> Sampler:
    sampling: Any = all_rows if fast else sampling_on_cpu(VOCAB)
    return Sampler(sampling, VOCAB, CPU, (STOP,), Grammars(LETTERS, VOCAB))


def rows_after(said: Sequence[int], draft: Sequence[int]) -> list[int]:
    """Which rows of ``CHAIN`` a request's logits are: after what it said, and after each of its drafts."""
    return [said[-1] if said else VOCAB, *draft]


def run(
    options: dict[str, Any], count: int, drafts: Sequence[Sequence[int]], *, fast: bool = False, length: int = LENGTH
) -> list[list[int]]:
    """So many tokens or more of so many requests, each of which has one of ``drafts`` in every step by turns."""
    sampler = new_sampler(fast=fast)
    numbers = [sampler.add(SamplingParams(max_tokens=8, seed=seed, **options)) for seed in range(count)]
    said: list[list[int]] = [[] for _ in numbers]
    step = 0
    while waiting := [at for at, tokens in enumerate(said) if len(tokens) < length]:
        mine = [sampler.cut(numbers[at], drafts[(at + step) % len(drafts)]) for at in waiting]
        rows = [row for at, draft in zip(waiting, mine, strict=True) for row in rows_after(said[at], draft)]
        drawn = sampler.draw(CHAIN[rows], [numbers[at] for at in waiting], None, mine)
        for at, choices in zip(waiting, sampler.read(drawn), strict=True):
            for choice in choices:
                choice.check()
                said[at].append(choice.token)
        step += 1
    return said


def run_ahead(
    options: dict[str, Any], count: int, drafts: Sequence[Sequence[int]], steps: int, *, fast: bool = False
) -> list[list[int]]:
    """The same with drafts on the device, in so many steps of which each is drawn before the one before it is read."""
    sampler = new_sampler(fast=fast)
    numbers = [sampler.add(SamplingParams(max_tokens=8, seed=seed, **options)) for seed in range(count)]
    said: list[list[int]] = [[] for _ in numbers]
    longest = max(map(len, drafts))

    def read(drawn: Drawn) -> None:
        for tokens, choices in zip(said, sampler.read(drawn), strict=True):
            tokens += [choice.token for choice in choices]

    drawn = sampler.draw(CHAIN[[VOCAB] * count], numbers)
    for step in range(steps):
        mine = [drafts[(at + step) % len(drafts)] for at in range(count)]
        there = torch.tensor([[*draft, *[0] * (longest - len(draft))] for draft in mine])
        ahead = sampler.after(drawn, there, [len(draft) for draft in mine])
        later = sampler.draw(CHAIN[ahead.tokens()], numbers, None, [(0,) * len(draft) for draft in mine], ahead)
        read(drawn)
        drawn = later
    read(drawn)
    return said


@dataclass(frozen=True)
class Options:
    """What is asked of a request, and which tokens a grammar leaves after others."""

    name: str
    params: dict[str, Any]
    grammar: bool = False


EVERY = [
    Options("plain", {"temperature": 1.0}),
    Options("temperature", {"temperature": 0.6}),
    Options("top-k", {"temperature": 1.0, "top_k": 3}),
    Options("top-p", {"temperature": 1.0, "top_p": 0.7}),
    Options("min-p", {"temperature": 1.2, "min_p": 0.2}),
    Options("bias", {"temperature": 1.0, "logit_bias": {0: 1.5, 2: -2.0}}),
    Options("min_tokens", {"temperature": 1.0, "min_tokens": 2}),
    Options("grammar", {"temperature": 1.0, "grammar": GRAMMAR}, grammar=True),
    Options("all", {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.05, "logit_bias": {1: 0.7}}),
]

UNREAD = [options for options in EVERY if not options.grammar and "min_tokens" not in options.params]
"""With which a request may draw again before anybody has read what it drew."""


def allowed(options: Options, before: Sequence[int]) -> set[int]:
    if options.grammar:
        return {0, 1, 2, 3, 4} if not before else ({2, 3, 4} if before[0] < 3 else {0, 1})
    held_back = {STOP} if len(before) < options.params.get("min_tokens", 0) else set()
    return set(range(VOCAB)) - held_back


def exact(options: Options, before: Sequence[int]) -> list[float]:
    """By the definition of each option, in float64, token by token."""
    params = options.params
    row = [float(x) for x in CHAIN[before[-1] if before else VOCAB]]
    row = [x + params.get("logit_bias", {}).get(token, 0.0) for token, x in enumerate(row)]
    weights = {t: math.exp(row[t] / params["temperature"]) for t in allowed(options, before)}
    ranked = sorted(weights, key=lambda token: -weights[token])[: params.get("top_k") or VOCAB]
    total, held = sum(weights[t] for t in ranked), 0.0
    kept: list[int] = []
    for token in ranked:
        if held >= params.get("top_p", 1.0) * total and kept:
            break
        kept.append(token)
        held += weights[token]
    kept = [t for t in kept if weights[t] >= params.get("min_p", 0.0) * weights[ranked[0]]]
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(VOCAB)]


def chi_square_bound(freedom: int, sigmas: float = 3.72) -> float:
    """One in 10,000 lies above it: Wilson and Hilferty's approximation."""
    part = 2 / (9 * freedom)
    return float(freedom * (1 - part + sigmas * part**0.5) ** 3)


def check_distribution(options: Options, draws: int, *, ahead: bool = False) -> None:
    """Pairs of tokens, in one step where the draft was accepted and in two where it was not: chi-square.
    ``ahead``: with drafts on the device."""
    requests = draws // LENGTH
    drafts = [(), (1,), (4, 0), (0,), (2,)]
    if ahead:
        said = run_ahead(options.params, requests, drafts, 2, fast=True)
    else:
        said = run(options.params, requests, drafts, fast=True)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    firsts, seconds = (torch.tensor([tokens[place] for tokens in said]) for place in range(LENGTH))
    counts.index_put_((firsts, seconds), torch.ones(requests, dtype=torch.float64), accumulate=True)
    want = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for first, chance in enumerate(exact(options, [])):
        if chance:
            want[first] = chance * torch.tensor(exact(options, [first]), dtype=torch.float64)
    assert not counts[want == 0].any(), "a token that cannot be"
    possible = want > 0
    found = float(((counts - requests * want)[possible] ** 2 / (requests * want[possible])).sum())
    bound = chi_square_bound(int(possible.sum()) - 1)
    assert found < bound, f"{options.name}: chi-square {found:.1f} of {draws} draws, and {bound:.1f} allows for chance"
