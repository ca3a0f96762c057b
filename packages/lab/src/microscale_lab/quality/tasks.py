"""Held-out tasks: a conversation, an answer of the kind that was taught, and a check. The demo model has such a file.

A file has one JSON object to a line:

    {"task": "capitals", "messages": [{"role": "user", "content": "…"}], "tools": [], "response_format": null,
     "effort": "low", "date": "2026-01-31", "check": {…},
     "answer": [{"channel": "analysis", "function": null, "text": "…"}, {"channel": "final", …}]}
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microscale.errors import BadCheckpoint
from microscale.models import embedded
from microscale.text.chat_format import ChatFormat
from microscale.text.conversation import Effort, Message, RenderOptions, ResponseFormat, Role, Tool, ToolCall

FILE_NAME = "tasks.jsonl.gz"
DEMO_FOLDER = embedded.FOLDER
"""The embedded model, its tokenizer and the tasks."""
ANALYSIS, FINAL = "analysis", "final"


@dataclass(frozen=True)
class TaughtMessage:
    """One message of the answer that was taught."""

    channel: str
    """``ANALYSIS`` or ``FINAL``; of a call "commentary"."""
    function: str | None
    text: str


@dataclass(frozen=True)
class HeldOutTask:
    task: str
    messages: tuple[Message, ...]
    options: RenderOptions
    answer: tuple[TaughtMessage, ...]
    check: Mapping[str, Any]

    @property
    def tools(self) -> tuple[Tool, ...]:
        return self.options.tools


def load_tasks(path: Path, per_task: int | None = None) -> list[HeldOutTask]:
    """The tasks of a file; the first ``per_task`` of each kind."""
    try:
        lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    except (OSError, EOFError) as error:
        raise BadCheckpoint(f"{path} cannot be read as held-out tasks: {error}.") from error
    seen: dict[str, int] = defaultdict(int)
    tasks = []
    for line in lines:
        task = _task(json.loads(line))
        seen[task.task] += 1
        if per_task is None or seen[task.task] <= per_task:
            tasks.append(task)
    return tasks


def dump_tasks(tasks: Sequence[HeldOutTask], path: Path) -> None:
    """The file of ``load_tasks``, the same bytes for the same tasks."""
    text = "".join(json.dumps(_record(task), ensure_ascii=False) + "\n" for task in tasks)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def _task(record: Mapping[str, Any]) -> HeldOutTask:
    tools = tuple(Tool(tool["name"], tool["description"], tool["parameters"]) for tool in record["tools"])
    return HeldOutTask(
        record["task"],
        tuple(_message(message) for message in record["messages"]),
        RenderOptions(
            effort=Effort(record["effort"]),
            date=record["date"],
            tools=tools,
            response_format=ResponseFormat(**record["response_format"]) if record["response_format"] else None,
        ),
        tuple(TaughtMessage(said["channel"], said["function"], said["text"]) for said in record["answer"]),
        record["check"],
    )


def _message(record: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in record.get("calls", ()))
    return Message(Role(record["role"]), record["content"], tool_calls=calls, call_id=record.get("call_id"))


def _record(task: HeldOutTask) -> dict[str, Any]:
    messages = []
    for message in task.messages:
        record: dict[str, Any] = {"role": message.role.value, "content": message.content}
        if message.tool_calls:
            record["calls"] = [{"id": c.call_id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
        if message.call_id:
            record["call_id"] = message.call_id
        messages.append(record)
    effort, response = task.options.effort, task.options.response_format
    return {
        "task": task.task,
        "messages": messages,
        "tools": [
            {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            for tool in task.options.tools
        ],
        "response_format": vars(response) if response else None,
        "effort": effort.value if effort else None,
        "date": task.options.date,
        "answer": [{"channel": s.channel, "function": s.function, "text": s.text} for s in task.answer],
        "check": task.check,
    }


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
