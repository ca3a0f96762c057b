"""Tasks in token ids, rendered as the server renders a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from microscale.text.chat_format import ChatFormat
from microscale.text.conversation import Message, Role, ToolCall
from microscale_lab.quality.tasks import ANALYSIS, FINAL, HeldOutTask


@dataclass(frozen=True)
class Encoded:
    """A task for one tokenizer."""

    task: HeldOutTask
    prompt: list[int]
    answer: list[int]
    """The answer that was taught, its end token included."""


def encode(task: HeldOutTask, chat_format: ChatFormat) -> Encoded:
    """Prompt and taught answer in token ids."""
    texts = {said.channel: said.text for said in task.answer if said.function is None}
    calls = tuple(ToolCall("", said.function, said.text) for said in task.answer if said.function is not None)
    answer = Message(Role.ASSISTANT, texts.get(FINAL, ""), texts.get(ANALYSIS, ""), calls)
    return Encoded(task, chat_format.render(task.messages, task.options), chat_format.turn(answer))
