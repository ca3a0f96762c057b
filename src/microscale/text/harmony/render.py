"""A conversation to token ids, through ``oss-harmony`` and the checkpoint's tokenizer.

The library lays the prompt out; the checkpoint's tokenizer encodes it. The library gets a one-character marker where a
message has its text, and its ids are walked: control tokens are mapped by name, the text between them is decoded,
the marker replaced, and the run encoded with the checkpoint's tokenizer, for which all text is text. With the library's
own vocabulary the result equals the library's, token for token.

The marker is there for time, too: the library's encoder is quadratic in the length of a word (40 s for 200,000 letters,
oss-harmony 0.0.11), so nothing long may reach it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import openai_harmony as library

from microscale.errors import BadRequest
from microscale.text.conversation import (
    Effort,
    Message,
    PromptEnd,
    Rendered,
    RenderOptions,
    ResponseFormat,
    Role,
    Tool,
    ToolCall,
    open_message,
)
from microscale.text.events import ASSISTANT
from microscale.text.harmony import tokens as names
from microscale.text.harmony.header import NAMESPACE
from microscale.text.harmony.tokens import HarmonyTokens
from microscale.text.tokenizer import Tokenizer

IDENTITY = "You are ChatGPT, a large language model trained by OpenAI."
KNOWLEDGE_CUTOFF = "2024-06"
MARKER = "\ue000"
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
# What o200k takes for one word at most: letters and marks, white space, signs. 1,024 take the library 1 to 9 ms.
MAX_WORD_CHARS = 1024
WORDS = tuple(map(re.compile, (r"[^\s\d!-/:-@\[-`{-~]+", r"\s+", r"[^\w\s]+")))

KEPT_CHARS = 1 << 20
"""Of all shapes of conversations whose skeletons are kept."""

EFFORTS = {
    Effort.LOW: library.ReasoningEffort.LOW,
    Effort.MEDIUM: library.ReasoningEffort.MEDIUM,
    Effort.HIGH: library.ReasoningEffort.HIGH,
}


@dataclass(frozen=True)
class Laid:
    """One message of Harmony."""

    message: library.Message
    text: str | None
    """What stands for its marker."""
    after: str = ""
    """What follows the library's text: a section that it does not know."""


class TextRun(NamedTuple):
    """Text between two control tokens."""

    text: str
    tokens: tuple[int, ...]
    """The checkpoint's, for a run that stays as it is."""


Skeleton = tuple[tuple[TextRun, int | None], ...]
"""A conversation without its texts: runs, each with the control token after it; after the last there is none."""


class HarmonyRenderer:
    """Renders for one checkpoint. Loading the library's vocabulary takes a second: make one and keep it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = HarmonyTokens.of(tokenizer)
        self._encode = tokenizer.encode
        self._library = library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)
        self._mapped = {
            self._library.encode(name, allowed_special="all")[0]: tokenizer.control[name] for name in names.NAMES
        }
        self._kept: dict[str, Skeleton] = {}
        """By shape. Conversations mostly differ in their texts alone."""
        self._kept_chars = 0

    def render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        """The prompt: system message, developer message, conversation, and where ``options.end`` says."""
        return self.rendered(conversation, options).tokens

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        if options.end is PromptEnd.OPEN:
            before, last = open_message(conversation)
            # Thoughts are a message of their own, and closed where an answer has begun after them.
            before += [replace(last, content="")] if last.reasoning and last.content else []
            begun = self.header("final") + self._encode(last.content)
            if last.reasoning and not last.content:
                begun = self.header("analysis") + self._encode(last.reasoning)
            return Rendered(self._render(before, options) + begun, tuple(begun))
        tokens = self._render(conversation, options)
        if options.end is PromptEnd.CLOSED:
            del tokens[len(tokens) - 1 - tokens[::-1].index(self.tokens.start) :]
            return Rendered(tokens, (self.tokens.end,))
        return Rendered(tokens)

    def _render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        laid = lay_out(conversation, options)
        try:
            skeleton = self._skeleton(library.Conversation.from_messages([entry.message for entry in laid]))
        except (ValueError, RecursionError, library.HarmonyError) as exc:
            raise BadRequest(f"The conversation or its tools cannot be rendered: {exc}.") from exc
        return self._fill(skeleton, iter(laid))

    def _skeleton(self, conversation: library.Conversation) -> Skeleton:
        """``conversation`` has markers for its texts."""
        shape = conversation.to_json()
        found = self._kept.get(shape)
        if found is None:
            found = self._make_skeleton(conversation)
            self._kept_chars += len(shape)
            if self._kept_chars > KEPT_CHARS:
                self._kept, self._kept_chars = {}, len(shape)
            if len(shape) <= KEPT_CHARS:
                self._kept[shape] = found
        return found

    def _make_skeleton(self, conversation: library.Conversation) -> Skeleton:
        skeleton = self._library.render_conversation_for_completion(
            conversation,
            library.Role.ASSISTANT,
            # ``lay_out`` drops it: the library keeps what lies between two finals.
            library.RenderConversationConfig(auto_drop_analysis=False),
        )
        found: list[tuple[TextRun, int | None]] = []
        run: list[int] = []
        for token in skeleton:
            mapped = self._mapped.get(token)
            if mapped is None:
                run.append(token)
            else:
                found.append((self._run(run), mapped))
                run = []
        return (*found, (self._run(run), None))

    def _run(self, tokens: Sequence[int]) -> TextRun:
        text: str = self._library.decode_utf8(tokens)
        return TextRun(text, tuple(self._encode(text)))

    def header(self, channel: str, function: str | None = None) -> list[int]:
        """What the model writes between the end of a prompt and its text, to force a final answer or a certain call."""
        if function is None:
            return [self.tokens.channel, *self._encode(channel), self.tokens.message]
        to = self._encode(f"{channel} to={recipient(function)} ")
        return [self.tokens.channel, *to, self.tokens.constrain, *self._encode("json"), self.tokens.message]

    def turn(self, message: Message) -> list[int]:
        """An assistant's message as the model writes it after a prompt."""
        said = _assistant(message)
        ids: list[int] = []
        for at, entry in enumerate(said):
            function = None if entry.message.recipient is None else entry.message.recipient.removeprefix(NAMESPACE)
            ids += [self.tokens.start, *self._encode(ASSISTANT)] if at else []
            ids += self.header(entry.message.channel or "final", function) + self._encode(entry.text or "")
            is_last = at == len(said) - 1
            ids.append(self.tokens.call if function else self.tokens.return_ if is_last else self.tokens.end)
        return ids

    def _fill(self, skeleton: Skeleton, laid: Iterator[Laid]) -> list[int]:
        """The checkpoint's tokens, with the texts in place of their markers."""
        ids: list[int] = []
        text, after = None, ""
        for run, control in skeleton:
            if text is None and not after:
                ids += run.tokens
            else:
                # Only the first: a tool's description may hold the same character, behind the instructions.
                ids += self._encode((run.text if text is None else run.text.replace(MARKER, text, 1)) + after)
            text, after = None, ""
            if control is not None:
                ids.append(control)
            if control == self.tokens.message:
                entry = next(laid)
                text, after = entry.text, entry.after
        return ids


def lay_out(conversation: Sequence[Message], options: RenderOptions) -> list[Laid]:
    """Harmony's messages, without the analysis that the format drops, with the texts that belong to the markers."""
    system = library.SystemContent(
        model_identity=IDENTITY,
        reasoning_effort=None if options.effort is None else EFFORTS[options.effort],
        conversation_start_date=options.date,
        knowledge_cutoff=KNOWLEDGE_CUTOFF,
    )
    laid = [Laid(library.Message.from_role_and_content(library.Role.SYSTEM, system), None)]
    num_leading = next((n for n, m in enumerate(conversation) if not _instructs(m)), len(conversation))
    instructions = "\n\n".join(message.content for message in conversation[:num_leading] if message.content)
    if instructions or options.tools or options.response_format:
        laid.append(_developer(instructions, options.tools, options.response_format))
    called: dict[str, str] = {}
    for message in conversation[num_leading:]:
        if _instructs(message):
            laid.append(_developer(message.content, ()))
        elif message.role is Role.USER:
            laid.append(Laid(library.Message.from_role_and_content(library.Role.USER, MARKER), message.content))
        elif message.role is Role.ASSISTANT:
            laid += _assistant(message)
            called |= {call.call_id: call.name for call in message.tool_calls}
        else:
            laid.append(_result(message, called))
    return _without_old_analysis(laid)


def recipient(function: str) -> str:
    """The address of a function of the developer's."""
    if not FUNCTION_NAME.fullmatch(function):
        raise BadRequest(
            f"{function[:64]!r} is no name for a function; take 1 to 128 letters, digits, '_', '-', '.' and ':'."
        )
    return NAMESPACE + function


def _instructs(message: Message) -> bool:
    # Harmony's system message is the engine's; what a client calls "system" is the developer's word.
    return message.role in (Role.SYSTEM, Role.DEVELOPER)


def _developer(instructions: str, tools: Sequence[Tool], response: ResponseFormat | None = None) -> Laid:
    content = library.DeveloperContent()
    if instructions:
        content = content.with_instructions(MARKER)
    if tools:
        content = content.with_function_tools([_described(tool) for tool in tools])
    message = library.Message.from_role_and_content(library.Role.DEVELOPER, content)
    after = "" if response is None else _section(response)
    return Laid(message, instructions or None, f"\n\n{after}" if after and (instructions or tools) else after)


def _section(response: ResponseFormat) -> str:
    """How Harmony tells the model which form its answer shall have."""
    lines = ["# Response Formats", "", f"## {response.name}", ""]
    lines += [f"// {line}" for line in response.description.splitlines()]
    return "\n".join([*lines, json.dumps(response.schema, ensure_ascii=False, separators=(",", ":"))])


def _described(tool: Tool) -> library.ToolDescription:
    recipient(tool.name)
    parameters = None if tool.parameters is None else dict(tool.parameters)
    try:
        text = tool.description + " " + json.dumps(parameters, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise BadRequest(f"The parameters of the tool {tool.name!r} are no JSON schema: {exc}.") from exc
    if any(len(found.group()) > MAX_WORD_CHARS for word in WORDS for found in word.finditer(text)):
        raise BadRequest(f"The tool {tool.name!r} holds a word of more than {MAX_WORD_CHARS} characters.")
    return library.ToolDescription.new(tool.name, tool.description, parameters)


def _assistant(message: Message) -> list[Laid]:
    said: list[Laid] = []
    if message.reasoning:
        said.append(Laid(_said("analysis"), message.reasoning))
    if message.content or not (message.reasoning or message.tool_calls):
        # Text before a call is a preamble, and a preamble goes to the commentary channel.
        said.append(Laid(_said("commentary" if message.tool_calls else "final"), message.content))
    return said + [_called(call) for call in message.tool_calls]


def _said(channel: str) -> library.Message:
    return library.Message.from_role_and_content(library.Role.ASSISTANT, MARKER).with_channel(channel)


def _called(call: ToolCall) -> Laid:
    message = _said("commentary").with_recipient(recipient(call.name)).with_content_type(names.CONSTRAIN + "json")
    return Laid(message, call.arguments)


def _result(message: Message, called: dict[str, str]) -> Laid:
    name = called.get(message.call_id or "") or message.name
    if name is None:
        call = (message.call_id or "")[:64]
        raise BadRequest(f"A tool's result answers the call {call!r}, which no earlier message made.")
    author = library.Author.new(library.Role.TOOL, recipient(name))
    result = library.Message.from_author_and_content(author, MARKER).with_channel("commentary")
    return Laid(result.with_recipient(library.Role.ASSISTANT.value), message.content)


def _without_old_analysis(laid: list[Laid]) -> list[Laid]:
    """Thoughts go once their turn has its final answer; those of a turn that still calls tools stay."""
    finals = [at for at, entry in enumerate(laid) if entry.message.channel == "final"]
    last = finals[-1] if finals else 0
    return [entry for at, entry in enumerate(laid) if at > last or entry.message.channel != "analysis"]
