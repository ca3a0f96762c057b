"""Samples in Harmony form, as pieces of text and control tokens with the weight that each has in the loss.

The same layout as ``microscale.text.harmony.render`` gives through the library, which needs 0.5 ms a message and is not
installed everywhere; a test holds the two against each other, token for token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from demo.data.base import Sample
from microscale.text.conversation import Message, Role, Tool
from microscale.text.harmony.render import IDENTITY, KNOWLEDGE_CUTOFF

CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
CALLS = "Calls to these tools must go to the commentary channel: 'functions'."
TOOLS = "# Tools\n\n## functions\n\nnamespace functions {\n\n"
TOOLS_END = "} // namespace functions"

PHRASES = (f"{IDENTITY}\nKnowledge cutoff: {KNOWLEDGE_CUTOFF}\nCurrent date: ", CHANNELS, CALLS, TOOLS, TOOLS_END)
"""Texts that stand in most prompts, word for word: each is one token."""

LEARN = 1.0
READ = 0.1
"""Weight of what the user, the tools and the developer say: knowing the words helps, foreseeing them does not."""
SKIP = 0.0


@dataclass(frozen=True)
class Piece:
    """Text, or the name of a control token."""

    text: str
    weight: float
    control: bool = False


def render(sample: Sample) -> list[Piece]:
    """The whole document. Only the turn that is taught has full weight: the thoughts of earlier turns are gone, and
    learning answers without them would teach not to think."""
    pieces = list(_message("system", _system(sample), SKIP))
    leading = [message for message in sample.history if message.role is Role.DEVELOPER]
    told = "\n\n".join(message.content for message in leading)
    if told or sample.tools or sample.response_format:
        pieces += _message("developer", _developer(told, sample), READ)
    names: dict[str, str] = {}
    for message in sample.history:
        if message.role is not Role.DEVELOPER:
            pieces += _said(message, names, SKIP if message.role is Role.ASSISTANT else READ, thoughts=False)
    for message in sample.turn:
        pieces += _said(message, names, LEARN if message.role is Role.ASSISTANT else READ, thoughts=True)
    pieces = _with_own_headers(pieces)
    return [*pieces[:-1], Piece("<|return|>" if pieces[-1].text == "<|end|>" else pieces[-1].text, LEARN, True)]


def _with_own_headers(pieces: Sequence[Piece]) -> list[Piece]:
    """``<|start|>assistant`` has weight where the model writes it itself: after a message of its own that did not end
    the turn."""
    changed = list(pieces)
    for at, piece in enumerate(pieces[:-2]):
        if piece.text == "<|end|>" and piece.weight == LEARN:
            changed[at + 1], changed[at + 2] = (Piece(p.text, LEARN, p.control) for p in pieces[at + 1 : at + 3])
    return changed


def prompt(sample: Sample) -> list[Piece]:
    """What the model sees before it answers: the document up to the beginning of the turn."""
    pieces = render(replace(sample, turn=(Message(Role.ASSISTANT),)))
    last = max(at for at, piece in enumerate(pieces) if piece.text == "<|start|>")
    return [*pieces[: last + 1], Piece("assistant", SKIP)]


def _system(sample: Sample) -> str:
    effort = f"\n\nReasoning: {sample.effort}\n\n"
    return f"{IDENTITY}\nKnowledge cutoff: {KNOWLEDGE_CUTOFF}\nCurrent date: {sample.date}{effort}{CHANNELS}" + (
        f"\n{CALLS}" if sample.tools else ""
    )


def _developer(told: str, sample: Sample) -> str:
    parts = [f"# Instructions\n\n{told}"] if told else []
    if sample.tools:
        parts.append(TOOLS + "".join(map(declaration, sample.tools)) + TOOLS_END)
    response = sample.response_format
    if response is not None:
        comment = f"// {response.description}\n" if response.description else ""
        schema = json.dumps(response.schema, ensure_ascii=False, separators=(",", ":"))
        parts.append(f"# Response Formats\n\n## {response.name}\n\n{comment}{schema}")
    return "\n\n".join(parts)


def _message(author: str, text: str, weight: float, header: str = "", end: str = "<|end|>") -> Iterator[Piece]:
    yield Piece("<|start|>", SKIP, True)
    yield Piece(author, SKIP)
    if header:
        yield Piece("<|channel|>", weight, True)
        channel, marker, content_type = header.partition("<|constrain|>")
        yield Piece(channel, weight)
        if marker:
            yield Piece(marker, weight, True)
            yield Piece(content_type, weight)
    yield Piece("<|message|>", weight, True)
    if text:
        yield Piece(text, weight)
    yield Piece(end, weight, True)


def _said(message: Message, names: dict[str, str], weight: float, *, thoughts: bool) -> Iterator[Piece]:
    if message.role is Role.USER:
        yield from _message("user", message.content, weight)
    elif message.role is Role.TOOL:
        author = f"functions.{names[message.call_id or '']}"
        yield from _message(author, message.content, weight, "commentary to=assistant")
    else:
        if message.reasoning and thoughts:
            yield from _message("assistant", message.reasoning, weight, "analysis")
        if message.content or not (message.reasoning or message.tool_calls):
            yield from _message("assistant", message.content, weight, "final")
        for call in message.tool_calls:
            names[call.call_id] = call.name
            header = f"commentary to=functions.{call.name} <|constrain|>json"
            yield from _message("assistant", call.arguments, weight, header, "<|call|>")


def declaration(tool: Tool) -> str:
    """A function as the library writes it: TypeScript, with descriptions as comments."""
    text = "".join(f"// {line}\n" for line in tool.description.splitlines())
    if tool.parameters is None:
        return f"{text}type {tool.name} = () => any;\n\n"
    return f"{text}type {tool.name} = (_: {{\n{_fields(tool.parameters)}}}) => any;\n\n"


def _fields(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    lines = []
    for name, spec in schema["properties"].items():
        if "description" in spec:
            lines.append(f"// {spec['description']}\n")
        lines.append(f"{name}{'' if name in required else '?'}: {_type(spec)},")
        lines.append(f" // default: {spec['default']}\n" if "default" in spec else "\n")
    return "".join(lines)


def _type(spec: Mapping[str, Any]) -> str:
    if "enum" in spec:
        return " | ".join(f'"{value}"' for value in spec["enum"])
    if spec["type"] == "array":
        return f"{_type(spec['items'])}[]"
    return "number" if spec["type"] == "integer" else str(spec["type"])
