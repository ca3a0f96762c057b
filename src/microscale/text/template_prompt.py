"""A conversation to token ids through the checkpoint's own chat template and tokenizer: for every format that has one.

The template makes one text in which control tokens stand by name. What a client wrote must not make one: before
rendering, a guard goes behind every ``<`` of it (and into names that begin otherwise), so that only the template's own
names are whole; they become tokens, the guards are taken out of the text between them, and that is encoded as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from microscale.errors import BadRequest
from microscale.text.chat_template import ChatTemplate
from microscale.text.conversation import Message, PromptEnd, RenderOptions, Role, Tool
from microscale.text.tokenizer import Tokenizer

GUARD = "\ue000"
"""A private character: followed by 0 it stands for itself, by 1 for nothing."""
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
MAX_SCHEMA_DEPTH = 64


class TemplatePrompt:
    """Renders for one checkpoint. Make it after the control tokens are protected."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        control = sorted(tokenizer.control, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, control)) + ")")
        others = [re.escape(name[0]) + f"(?={re.escape(name[1:])})" for name in control if not name.startswith("<")]
        self._risky = re.compile("|".join([GUARD, "<", *others]))

    def render(self, conversation: Sequence[Message], options: RenderOptions, **values: Any) -> list[int]:
        """What the template makes of the conversation. ``values``: what the format tells its template besides."""
        messages = [self._guarded(message) for message in lay_out(conversation, options)]
        tools = [self._guarded(_described(tool)) for tool in options.tools]
        text = self._template.render(
            messages,
            tools=tools or None,
            add_generation_prompt=options.end is not PromptEnd.CLOSED,
            **values,
        )
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._split.split(text):
            if piece in self._tokenizer.control:
                ids.append(self._tokenizer.control[piece])
            elif piece:
                ids += self._tokenizer.encode(_unguarded(piece))
        return ids

    def _guarded(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_SCHEMA_DEPTH:
            raise BadRequest(f"Tools or arguments are nested deeper than {MAX_SCHEMA_DEPTH} levels.")
        if isinstance(value, str):
            return self._risky.sub(lambda found: GUARD + "0" if found[0] == GUARD else f"{found[0]}{GUARD}1", value)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(inner, depth + 1) for inner in value]
        return value


def _unguarded(text: str) -> str:
    return re.sub(GUARD + "([01])", lambda found: GUARD if found[1] == "0" else "", text)


def lay_out(conversation: Sequence[Message], options: RenderOptions) -> list[dict[str, Any]]:
    """The messages as templates take them. All instructions that come first are one system message."""
    num_leading = next((n for n, m in enumerate(conversation) if not _instructs(m)), len(conversation))
    instructions = [message.content for message in conversation[:num_leading] if message.content]
    if options.response_format is not None:
        schema = json.dumps(options.response_format.schema, ensure_ascii=False)
        instructions.append(f"Answer with JSON of this schema and with nothing else:\n{schema}")
    laid: list[dict[str, Any]] = []
    if instructions:
        laid.append({"role": "system", "content": "\n\n".join(instructions)})
    called: dict[str, str] = {}
    for message in conversation[num_leading:]:
        if message.role is Role.TOOL:
            laid.append(_result(message, called))
        else:
            role = "system" if _instructs(message) else message.role.value
            laid.append({"role": role, "content": message.content, **_assistants(message)})
            called |= {call.call_id: call.name for call in message.tool_calls}
    if not laid:
        raise BadRequest("The conversation is empty; send at least one message.")
    return laid


def _instructs(message: Message) -> bool:
    return message.role in (Role.SYSTEM, Role.DEVELOPER)


def _assistants(message: Message) -> dict[str, Any]:
    """What only an assistant's message has."""
    found: dict[str, Any] = {}
    if message.reasoning:
        found["reasoning"] = found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": _checked(call.name), "arguments": arguments}}
            for call, arguments in zip(message.tool_calls, _arguments(message), strict=True)
        ]
    return found


def _arguments(message: Message) -> Iterator[Any]:
    """As an object, which templates spell in the model's own way; text that is none as it is."""
    for call in message.tool_calls:
        try:
            found = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            found = call.arguments
        yield found if isinstance(found, dict) else call.arguments


def _result(message: Message, called: Mapping[str, str]) -> dict[str, Any]:
    name = called.get(message.call_id or "") or message.name
    if name is None:
        call = (message.call_id or "")[:64]
        raise BadRequest(f"A tool's result answers the call {call!r}, which no earlier message made.")
    return {"role": "tool", "name": _checked(name), "tool_call_id": message.call_id, "content": message.content}


def _described(tool: Tool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else dict(tool.parameters)
    function = {"name": _checked(tool.name), "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _checked(name: str) -> str:
    if not FUNCTION_NAME.fullmatch(name):
        raise BadRequest(
            f"{name[:64]!r} is no name for a function; take 1 to 128 letters, digits, '_', '-', '.' and ':'."
        )
    return name
