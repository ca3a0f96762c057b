"""Greedy answers of the model in training, and how many are right. No KV cache: a step is a whole forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from demo.chat import prompt
from demo.data.mixture import held_out
from demo.model import Model
from demo.shards import PADDING, Encoder
from demo.tasks import as_task
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.checks import is_right, parse

ASKED = ("addition", "capitals", "tools", "json", "letters", "words", "follow-ups")
MAX_NEW = 160
BATCH = 64


@torch.no_grad()
def answers(
    model: Model, prompts: Sequence[Sequence[int]], device: torch.device, max_new: int = MAX_NEW
) -> list[list[int]]:
    """The new tokens of each prompt, up to and with an end token. Prompts of like length run together."""
    new: list[list[int]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
    trained_with = model.options
    # Sizes change with every token: what is compiled for one size stays out.
    model.options = replace(trained_with, attention="plain", gate="plain")
    for start in range(0, len(prompts), BATCH):
        going = by_length[start : start + BATCH]
        for _ in range(max_new):
            for at, token in zip(going, _next(model, [[*prompts[at], *new[at]] for at in going], device), strict=True):
                new[at].append(token)
            going = [at for at in going if new[at][-1] not in model.config.eos_token_ids]
            if not going:
                break
    model.options = trained_with
    return new


def _next(model: Model, rows: Sequence[Sequence[int]], device: torch.device) -> list[int]:
    length = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=device)
    documents = torch.tensor([[0] * len(row) + [PADDING] * (length - len(row)) for row in rows], device=device)
    hidden, _ = model.hidden(tokens, documents.int())
    last = hidden[torch.arange(len(rows), device=device), torch.tensor([len(row) - 1 for row in rows], device=device)]
    chosen: list[int] = (last.float() @ model.lm_head.bfloat16().float().T).argmax(-1).tolist()
    return chosen


def accuracies(
    model: Model, tokenizer: Path, device: torch.device, per_task: int, tasks: Sequence[str] = ASKED
) -> dict[str, float]:
    """The share of right answers to held-out prompts, by task."""
    encoder = Encoder(tokenizer)
    chat_format = chat_format_for(Tokenizer.load(tokenizer))
    samples = [(task, sample) for task in tasks for sample in held_out(task, per_task, seed=1)]
    prompts = [[token for piece in prompt(sample) for token in encoder.ids(piece)] for _, sample in samples]
    right = dict.fromkeys(tasks, 0)
    for (task, sample), answer in zip(samples, answers(model, prompts, device), strict=True):
        right[task] += is_right(parse(answer, chat_format, as_task(sample).tools), sample.check)
    return {task: count / per_task for task, count in right.items()}
