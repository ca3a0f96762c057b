"""The chat formats over tiny tokenizers, and what tests of all of them do: parse an output, follow a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.text.chat_format import ChatFormat
from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml.format import ChatmlFormat
from microscale.text.conversation import Tool
from microscale.text.events import Flaw
from microscale.text.gemma.format import GemmaFormat
from microscale.text.harmony.format import HarmonyFormat
from microscale.text.output import ChatOutput, Delta, PlainOutput
from support import tiny_chatml_text, tiny_gemma_text
from support.tiny_chatml_text import tiny_chatml
from support.tiny_gemma_text import tiny_gemma
from support.tiny_tokenizers import tiny


def gemma(template: str = tiny_gemma_text.TEMPLATE) -> GemmaFormat:
    return GemmaFormat(tiny_gemma(), ChatTemplate(template, "test"))


def chatml(template: str = tiny_chatml_text.TEMPLATE) -> ChatmlFormat:
    return ChatmlFormat(tiny_chatml(), ChatTemplate(template, "test"))


MAKE: dict[str, Callable[[], ChatFormat]] = {
    "harmony": lambda: HarmonyFormat(tiny()),
    "gemma": gemma,
    "chatml": chatml,
    "chatml_xml": lambda: chatml(tiny_chatml_text.XML_CALLS),
}


@cache
def made(name: str) -> ChatFormat:
    return MAKE[name]()


TYPES = {
    str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null",
}  # fmt: skip


def schema_of(arguments: Mapping[str, object]) -> dict[str, object]:
    """A schema of exactly these parameters, each with the type of its value."""
    properties = {name: {"type": TYPES[type(value)]} for name, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(arguments), "additionalProperties": False}


def xml(function: str, *parameters: tuple[str, str]) -> str:
    """A call in XML as Qwen 3.6 writes it."""
    values = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parameters)
    return f"<tool_call>\n<function={function}>\n{values}</function>\n</tool_call>"


class Parsed(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]
    flaws: list[Flaw]


def run(output: ChatOutput | PlainOutput, groups: Sequence[Sequence[int]]) -> list[Delta]:
    return [*(delta for group in groups if (delta := output.feed(group))), output.finish()]


def total(deltas: Sequence[Delta], flaws: Sequence[Flaw] = ()) -> Parsed:
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.calls):
        if call.function is not None:
            calls.append((call.function, ""))
        calls[call.call_idx] = (calls[call.call_idx][0], calls[call.call_idx][1] + call.arguments)
    return Parsed("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas), calls, list(flaws))


def parse(
    name: str, text: str, tools: Sequence[Tool] | None = None, begun: str = "", stops: Sequence[str] = ()
) -> Parsed:
    """Parse an output one token at a time. Control tokens are written by name."""
    encode = made(name).tokenizer.encode_with_control
    output = ChatOutput(made(name).parser(tools), stops=stops, begun=encode(begun))
    ids = encode(text)
    deltas = run(output, [[token] for token in ids])
    assert [token for delta in deltas for token in delta.token_ids] == ids
    return total(deltas, output.flaws)


def follows(chat_format: ChatFormat, grammar: str, text: str | Sequence[int]) -> bool:
    """Whether the grammar allows every token, and is complete after the last."""
    tokenizer = chat_format.tokenizer
    words = tokenizer.vocabulary()
    vocabulary = Vocabulary(words, sorted(tokenizer.control.values()), tokenizer.split_pattern)
    matcher = Grammars(vocabulary, len(words)).matcher(grammar)
    ids = tokenizer.encode_with_control(text) if isinstance(text, str) else text
    return all(map(matcher.inner.consume_token, ids)) and matcher.ended
