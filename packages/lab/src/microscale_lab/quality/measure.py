"""Accuracy on tasks, and next-token distributions against those of float32."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from microscale.engine.generate import Generation
from microscale.engine.runner import Model
from microscale.engine.sampling_params import SamplingParams
from microscale.models.config import LayerKind
from microscale.text.chat_format import ChatFormat
from microscale_lab.batches import SequenceChunk, build_batch
from microscale_lab.quality.checks import is_right, parse
from microscale_lab.quality.tasks import Encoded

if TYPE_CHECKING:
    from torch import Tensor

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


def complete(
    model: Model,
    encoded: Sequence[Encoded],
    params: SamplingParams,
    on_answers: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The model's answers, ``BATCH`` prompts at a time."""
    answers: list[list[int]] = []
    for start in range(0, len(encoded), BATCH):
        prompts = [item.prompt for item in encoded[start : start + BATCH]]
        answers += [completion.token_ids for completion in Generation(model, prompts, params).run()]
        on_answers(len(prompts))
    return answers


def greedy(
    model: Model, encoded: Sequence[Encoded], max_tokens: int, on_answers: Callable[[int], None] = lambda count: None
) -> list[list[int]]:
    """The model's likeliest answers."""
    return complete(model, encoded, SamplingParams(max_tokens=max_tokens), on_answers)


def greedy_after(
    model: Model,
    encoded: Sequence[Encoded],
    drafts: Sequence[list[int]],
    max_tokens: int,
    on_answers: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """``greedy``, given what float32 answered.

    One pass over a draft shows how far it is what this model says as well; from the first difference on the model goes
    on by itself. On two CPU cores that is a third of the time of decoding it all.
    """
    answers: list[list[int]] = []
    going: list[tuple[int, Encoded]] = []
    for at, (item, draft) in enumerate(zip(encoded, drafts, strict=True)):
        likeliest = scores(model, item.prompt, draft).argmax(-1).tolist()
        differs = next(
            (n for n, (mine, theirs) in enumerate(zip(likeliest, draft, strict=True)) if mine != theirs), None
        )
        answer = draft if differs is None else [*draft[:differs], likeliest[differs]]
        answers.append(answer)
        if differs is None or answer[-1] in model.config.eos_token_ids or len(answer) == max_tokens:
            on_answers(1)
        else:
            going.append((at, replace(item, prompt=item.prompt + answer)))
    rest = greedy(model, [item for _, item in going], max_tokens, on_answers)
    for (at, _), more in zip(going, rest, strict=True):
        answers[at] = (answers[at] + more)[:max_tokens]
    return answers


def check_answers(encoded: Sequence[Encoded], answers: Sequence[list[int]], chat_format: ChatFormat) -> Accuracy:
    """Which answers pass their check."""
    found = Accuracy()
    for item, answer in zip(encoded, answers, strict=True):
        name = item.task.task
        found.asked[name] += 1
        found.right[name] += is_right(parse(answer, chat_format, item.task.tools), item.task.check)
    return found


def scores(model: Model, prompt: list[int], answer: list[int]) -> Tensor:
    """``[answer, vocabulary]``: the logits of each token of the answer, given those before it."""
    ids = prompt + answer
    num_pages = -(-len(ids) // model.page_size)
    chunk = SequenceChunk(ids[:-1], 0, dict.fromkeys(LayerKind, range(num_pages)), num_logits=len(answer))
    batch = build_batch([chunk], model.page_size, model.device)
    return model.forward(batch, model.new_cache(dict.fromkeys(LayerKind, num_pages))).values


def log_probabilities(model: Model, encoded: Sequence[Encoded]) -> Iterator[Tensor]:
    """For each task ``[answer, vocabulary]``: the distribution of each token of the answer that was taught.

    One at a time: with gpt-oss's vocabulary a token has 0.8 MB.
    """
    for item in encoded:
        yield torch.log_softmax(scores(model, item.prompt, item.answer).float(), dim=-1).cpu()


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
