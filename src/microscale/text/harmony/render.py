"""Renders a conversation to token ids, with ``oss-harmony`` and the checkpoint's tokenizer.

The library decides the layout; the checkpoint's tokenizer encodes it. The library gets a one-character marker in place
of each message's text. In its ids, control tokens are mapped by name; the text between them is decoded, the marker
replaced, and the result encoded with the checkpoint's tokenizer, which never produces control tokens from text. With
the library's own vocabulary the result equals the library's, token for token.

The marker also saves time: the library's encoder is quadratic in the length of a word (40 s for 200,000 letters,
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
    answered_function,
    check_function_name,
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
# The longest runs that o200k treats as one word: letters and marks, white space, signs. 1,024 take 1 to 9 ms.
MAX_WORD_CHARS = 1024
WORDS = tuple(map(re.compile, (r"[^\s\d!-/:-@\[-`{-~]+", r"\s+", r"[^\w\s]+")))

KEPT_CHARS = 1 << 20
"""Maximum size of all conversation shapes whose skeletons are cached."""

EFFORTS = {
    Effort.LOW: library.ReasoningEffort.LOW,
    Effort.MEDIUM: library.ReasoningEffort.MEDIUM,
    Effort.HIGH: library.ReasoningEffort.HIGH,
}


@dataclass(frozen=True)
class Laid:
    """One message in Harmony's layout."""

    message: library.Message
    text: str | None
    """What replaces its marker."""
    after: str = ""
    """Text after the library's own: a section that it does not support."""


class TextRun(NamedTuple):
    """Text between two control tokens."""

    text: str
    tokens: tuple[int, ...]
    """The checkpoint's tokens, for a run without a marker."""


Skeleton = tuple[tuple[TextRun, int | None], ...]
"""A conversation without its texts: runs, each with the control token after it, if any."""


class HarmonyRenderer:
    """Renders for one checkpoint. Loading the library's vocabulary takes a second: create it once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = HarmonyTokens.of(tokenizer)
        self._encode = tokenizer.encode
        self._library = library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)
        self._mapped = {
            self._library.encode(name, allowed_special="all")[0]: tokenizer.control[name] for name in names.NAMES
        }
        self._kept: dict[str, Skeleton] = {}
        """By shape. Most conversations differ only in their texts."""
        self._kept_chars = 0

    def render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        """The prompt: system message, developer message, conversation, ending where ``options.end`` says."""
        return self.rendered(conversation, options).tokens

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        if options.end is PromptEnd.OPEN:
            before, last = open_message(conversation)
            # Reasoning is a separate message, and is complete if an answer has begun after it.
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
        kept = self._kept.get(shape)
        if kept is None:
            kept = self._make_skeleton(conversation)
            self._kept_chars += len(shape)
            if self._kept_chars > KEPT_CHARS:
                self._kept, self._kept_chars = {}, len(shape)
            if len(shape) <= KEPT_CHARS:
                self._kept[shape] = kept
        return kept

    def _make_skeleton(self, conversation: library.Conversation) -> Skeleton:
        skeleton = self._library.render_conversation_for_completion(
            conversation,
            library.Role.ASSISTANT,
            # ``lay_out`` drops old analysis itself: the library keeps what is between two finals.
            library.RenderConversationConfig(auto_drop_analysis=False),
        )
        runs: list[tuple[TextRun, int | None]] = []
        run: list[int] = []
        for token in skeleton:
            mapped = self._mapped.get(token)
            if mapped is None:
                run.append(token)
            else:
                runs.append((self._run(run), mapped))
                run = []
        return (*runs, (self._run(run), None))

    def _run(self, tokens: Sequence[int]) -> TextRun:
        text: str = self._library.decode_utf8(tokens)
        return TextRun(text, tuple(self._encode(text)))

    def header(self, channel: str, function: str | None = None) -> list[int]:
        """The header that the model writes before a final answer or a certain call."""
        if function is None:
            return [self.tokens.channel, *self._encode(channel), self.tokens.message]
        to = self._encode(f"{channel} to={recipient(function)} ")
        return [self.tokens.channel, *to, self.tokens.constrain, *self._encode("json"), self.tokens.message]

    def turn(self, message: Message) -> list[int]:
        """An assistant's message as the model writes it after a prompt."""
        entries = _assistant(message)
        ids: list[int] = []
        for at, entry in enumerate(entries):
            function = None if entry.message.recipient is None else entry.message.recipient.removeprefix(NAMESPACE)
            ids += [self.tokens.start, *self._encode(ASSISTANT)] if at else []
            ids += self.header(entry.message.channel or "final", function) + self._encode(entry.text or "")
            is_last = at == len(entries) - 1
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
                # Only the first: a tool's description after the instructions may contain the same character.
                ids += self._encode((run.text if text is None else run.text.replace(MARKER, text, 1)) + after)
            text, after = None, ""
            if control is not None:
                ids.append(control)
            if control == self.tokens.message:
                entry = next(laid)
                text, after = entry.text, entry.after
        return ids


def lay_out(conversation: Sequence[Message], options: RenderOptions) -> list[Laid]:
    """Harmony's messages with the texts for their markers, without the analysis that the format drops."""
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
    """The recipient that means a function."""
    return NAMESPACE + check_function_name(function)


def _instructs(message: Message) -> bool:
    # Harmony's system message is the engine's own; a client's "system" message is a developer message.
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
    """Harmony's description of the answer's format."""
    lines = ["# Response Formats", "", f"## {response.name}", ""]
    lines += [f"// {line}" for line in response.description.splitlines()]
    return "\n".join([*lines, json.dumps(response.schema, ensure_ascii=False, separators=(",", ":"))])


def _described(tool: Tool) -> library.ToolDescription:
    recipient(tool.name)
    parameters = None if tool.parameters is None else dict(tool.parameters)
    try:
        text = tool.description + " " + json.dumps(parameters, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as exc:
        raise BadRequest(f"The parameters of the tool {tool.name!r} are not a JSON schema: {exc}.") from exc
    if any(len(match.group()) > MAX_WORD_CHARS for word in WORDS for match in word.finditer(text)):
        raise BadRequest(f"The tool {tool.name!r} contains a word of more than {MAX_WORD_CHARS} characters.")
    return library.ToolDescription.new(tool.name, tool.description, parameters)


def _assistant(message: Message) -> list[Laid]:
    entries: list[Laid] = []
    if message.reasoning:
        entries.append(Laid(_marked("analysis"), message.reasoning))
    if message.content or not (message.reasoning or message.tool_calls):
        # Text before a call is a preamble, which belongs to the commentary channel.
        entries.append(Laid(_marked("commentary" if message.tool_calls else "final"), message.content))
    return entries + [_called(call) for call in message.tool_calls]


def _marked(channel: str) -> library.Message:
    return library.Message.from_role_and_content(library.Role.ASSISTANT, MARKER).with_channel(channel)


def _called(call: ToolCall) -> Laid:
    message = _marked("commentary").with_recipient(recipient(call.name)).with_content_type(names.CONSTRAIN + "json")
    return Laid(message, call.arguments)


def _result(message: Message, called: dict[str, str]) -> Laid:
    author = library.Author.new(library.Role.TOOL, recipient(answered_function(message, called)))
    result = library.Message.from_author_and_content(author, MARKER).with_channel("commentary")
    return Laid(result.with_recipient(library.Role.ASSISTANT.value), message.content)


def _without_old_analysis(laid: list[Laid]) -> list[Laid]:
    """Drop the analysis of turns that have a final answer; keep that of a turn that still calls tools."""
    finals = [at for at, entry in enumerate(laid) if entry.message.channel == "final"]
    last = finals[-1] if finals else 0
    return [entry for at, entry in enumerate(laid) if at > last or entry.message.channel != "analysis"]
