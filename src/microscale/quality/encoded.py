"""Tasks in token ids, rendered as the server renders a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from microscale.quality.tasks import Task
from microscale.text.harmony_render import HarmonyRenderer
from microscale.text.harmony_tokens import RETURN


@dataclass(frozen=True)
class Encoded:
    """A task for one tokenizer."""

    task: Task
    prompt: list[int]
    answer: list[int]
    """The answer that was taught, its end token included."""


def encode(task: Task, renderer: HarmonyRenderer) -> Encoded:
    """Prompt and taught answer in token ids."""
    tokens, tokenizer = renderer.tokens, renderer.tokens.tokenizer
    answer: list[int] = []
    for at, said in enumerate(task.answer):
        if at:
            answer += [tokens.start, *tokenizer.encode("assistant")]
        answer += renderer.header(said.channel, said.function) + tokenizer.encode(said.text)
        last = at == len(task.answer) - 1
        answer.append(tokens.call if said.function else tokenizer.control[RETURN] if last else tokens.end)
    return Encoded(task, renderer.render(task.messages, task.options), answer)
