"""Accuracy on tasks, and next-token distributions against those of float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from microscale.engine.generate import Generation
from microscale.engine.inputs import Chunk, build_batch
from microscale.engine.runner import Model
from microscale.engine.sampler import SamplingParams
from microscale.models.config import LayerKind
from microscale.quality.checks import is_right, parse
from microscale.quality.encoded import Encoded
from microscale.text.harmony_tokens import HarmonyTokens

MAX_TOKENS = 320
"""Of an answer, where nothing else is asked for; those that were taught have 200 at most."""
BATCH = 32


@dataclass
class Accuracy:
    """Right answers of all, by task."""

    right: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    asked: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def share(self) -> float:
        return sum(self.right.values()) / max(1, sum(self.asked.values()))

    def of(self, task: str) -> float:
        return self.right[task] / self.asked[task]


@dataclass(frozen=True)
class Distance:
    """How next-token distributions differ from float32's, over the tokens of the answers that were taught."""

    loss: float
    """Nats per token."""
    kl: float
    """Of float32 from this one, nats per token."""
    top1: float
    """Share of positions at which both would say the same token."""


def complete(model: Model, encoded: Sequence[Encoded], params: SamplingParams) -> list[list[int]]:
    """The model's answers, ``BATCH`` prompts at a time."""
    answers: list[list[int]] = []
    for start in range(0, len(encoded), BATCH):
        prompts = [item.prompt for item in encoded[start : start + BATCH]]
        answers += [completion.token_ids for completion in Generation(model, prompts, params).run()]
    return answers


def accuracy(
    model: Model,
    encoded: Sequence[Encoded],
    tokens: HarmonyTokens,
    max_tokens: int = MAX_TOKENS,
    on_answers: Callable[[int], None] = lambda count: None,
) -> Accuracy:
    """Greedy answers, judged."""
    found = Accuracy()
    params = SamplingParams(max_tokens=max_tokens)
    for start in range(0, len(encoded), BATCH):
        asked = encoded[start : start + BATCH]
        for item, answer in zip(asked, complete(model, asked, params), strict=True):
            name = item.task.task
            found.asked[name] += 1
            found.right[name] += is_right(parse(answer, tokens, item.task.tools), item.task.check)
        on_answers(len(asked))
    return found


def log_probabilities(model: Model, encoded: Sequence[Encoded]) -> Iterator[Tensor]:
    """For each task ``[answer, vocabulary]``: the distribution of each token of the answer, given those before it.

    One at a time: with gpt-oss's vocabulary a token has 0.8 MB.
    """
    for item in encoded:
        ids = item.prompt + item.answer
        num_pages = -(-len(ids) // model.page_size)
        pages = dict.fromkeys(LayerKind, range(num_pages))
        chunk = Chunk(ids[:-1], 0, pages, num_logits=len(item.answer))
        batch = build_batch([chunk], model.page_size, model.device)
        logits = model.forward(batch, model.new_cache(dict.fromkeys(LayerKind, num_pages))).values
        yield torch.log_softmax(logits.float(), dim=-1).cpu()


def distance(found: Iterable[Tensor], exact: Sequence[Tensor], encoded: Sequence[Encoded]) -> Distance:
    """Of the distributions of one choice from float32's."""
    losses, divergences, same = [], [], []
    for mine, theirs, item in zip(found, exact, encoded, strict=True):
        losses.append(-mine.gather(1, torch.tensor(item.answer)[:, None])[:, 0])
        divergences.append((theirs.exp() * (theirs - mine)).sum(1))
        same.append(mine.argmax(1) == theirs.argmax(1))
    return Distance(
        float(torch.cat(losses).mean()), float(torch.cat(divergences).mean()), float(torch.cat(same).float().mean())
    )
