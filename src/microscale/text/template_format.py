"""Chat formats whose prompts the checkpoint's own chat template lays out.

The template produces one text in which control tokens appear by name. Client text must not produce any: before
rendering, a guard is inserted after every ``<`` in it (and into names that begin otherwise), so that only the
template's own names are intact. They become tokens; the guards are removed from the text between them, which is encoded
as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from microscale.errors import BadRequest
from microscale.text.chat_format import ChatFormat
from microscale.text.chat_template import ChatTemplate
from microscale.text.conversation import (
    Effort,
    Message,
    PromptEnd,
    RenderOptions,
    Role,
    Tool,
    answered_function,
    check_function_name,
)
from microscale.text.tokenizer import Tokenizer

GUARD = "\ue000"
"""A private-use character: followed by 0 it means itself, followed by 1 nothing."""
MAX_SCHEMA_DEPTH = 64


class TemplatePrompt:
    """Renders for one checkpoint. Create it after the control tokens are protected."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokenizer = tokenizer
        self._template = template
        control = sorted(tokenizer.control, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, control)) + ")")
        others = [re.escape(name[0]) + f"(?={re.escape(name[1:])})" for name in control if not name.startswith("<")]
        self._risky = re.compile("|".join([GUARD, "<", *others]))

    def render(self, conversation: Sequence[Message], options: RenderOptions, **values: Any) -> list[int]:
        """Render a conversation. ``values``: further variables for the template."""
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
            raise BadRequest(f"Tools or arguments are nested more than {MAX_SCHEMA_DEPTH} levels deep.")
        if isinstance(value, str):
            return self._risky.sub(lambda match: GUARD + "0" if match[0] == GUARD else f"{match[0]}{GUARD}1", value)
        if isinstance(value, Mapping):
            return {self._guarded(key): self._guarded(inner, depth + 1) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(inner, depth + 1) for inner in value]
        return value


class TemplateFormat(ChatFormat):
    """A chat format with the template next to the checkpoint's tokenizer."""

    BOS: ClassVar[str] = ""
    """The token at the beginning of a prompt, where the tokenizer has it."""
    EOS: ClassVar[str]

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, stops: Collection[int] = ()) -> None:
        super().__init__(tokenizer, stops)
        self._encode = tokenizer.encode
        self._prompt = TemplatePrompt(tokenizer, template)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        return cls(tokenizer, ChatTemplate.load(Path(tokenizer.source).parent))

    def _render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        control = self.tokenizer.control
        keep = options.preserve_thinking
        return self._prompt.render(
            conversation,
            options,
            # Reasoning is on or off; there are no levels.
            enable_thinking=options.effort in (Effort.MEDIUM, Effort.HIGH),
            bos_token=self.BOS if self.BOS in control else "",
            eos_token=self.EOS if self.EOS in control else "",
            **({} if keep is None else {"preserve_thinking": keep}),
        )


def _unguarded(text: str) -> str:
    return re.sub(GUARD + "([01])", lambda match: GUARD if match[1] == "0" else "", text)


def lay_out(conversation: Sequence[Message], options: RenderOptions) -> list[dict[str, Any]]:
    """The messages in the form that templates expect. Leading instructions become one system message."""
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
    """The fields that only an assistant's message has."""
    fields: dict[str, Any] = {}
    if message.reasoning:
        fields["reasoning"] = fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.call_id,
                "type": "function",
                "function": {"name": check_function_name(call.name), "arguments": arguments},
            }
            for call, arguments in zip(message.tool_calls, _arguments(message), strict=True)
        ]
    return fields


def _arguments(message: Message) -> Iterator[Any]:
    """Arguments as an object, which templates write in the model's own way; other text unchanged."""
    for call in message.tool_calls:
        try:
            value = json.loads(call.arguments or "{}")
        except (ValueError, RecursionError):
            value = call.arguments
        yield value if isinstance(value, dict) else call.arguments


def _result(message: Message, called: Mapping[str, str]) -> dict[str, Any]:
    name = check_function_name(answered_function(message, called))
    return {"role": "tool", "name": name, "tool_call_id": message.call_id, "content": message.content}


def _described(tool: Tool) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {}} if tool.parameters is None else dict(tool.parameters)
    function = {"name": check_function_name(tool.name), "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
