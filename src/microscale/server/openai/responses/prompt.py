"""Builds the prompt of a Responses request: looks up the conversation, converts it, and drops its oldest messages if it
is too long and ``truncation`` allows that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from microscale.server import error_texts
from microscale.server.error_texts import BadField, RequestError
from microscale.server.generation.chat_prompt import ChatPrompt, render
from microscale.server.host import Host
from microscale.server.openai.responses.request import ResponsesRequest
from microscale.server.openai.responses.store import StoredItem
from microscale.server.openai.responses.to_chat import chat_fields, messages_of, new_items
from microscale.server.openai.responses.toolbox import Toolbox
from microscale.server.requests.chat import AssistantMessage, ChatFields, ChatMessage, TextMessage, ToolMessage
from microscale.server.requests.response_format import TextFormat
from microscale.server.structured.output_format import OutputFormat, text_format

RESERVE = 8
"""With ``truncation: auto``, a truncated conversation leaves 1/8 of the context for the answer, or
``max_output_tokens`` if that is less."""


@dataclass(frozen=True)
class ResponsePrompt:
    prompt: ChatPrompt
    chat: ChatFields
    output_format: OutputFormat | None
    items: tuple[StoredItem, ...]
    """The whole conversation so far."""


async def response_prompt(
    host: Host, request: ResponsesRequest, toolbox: Toolbox, owner: str, num_bytes: int
) -> ResponsePrompt:
    """Raises ``BadField`` with the names that fields have in this API."""
    before = _previous(host, request, owner)
    size = num_bytes + sum(item.size for item in before)
    with named_as_sent(toolbox):
        return await host.off_loop(size, lambda: _prepared(host, request, toolbox, owner, before))


def _previous(host: Host, request: ResponsesRequest, owner: str) -> tuple[StoredItem, ...]:
    before = request.previous_response_id
    if before is None:
        return ()
    try:
        return host.stored.get(before, owner).items
    except RequestError as error:
        raise error_texts.previous_response_not_found(error) from None


def _prepared(
    host: Host, request: ResponsesRequest, toolbox: Toolbox, owner: str, before: tuple[StoredItem, ...]
) -> ResponsePrompt:
    items = (*before, *new_items(request, before, host.stored, owner))
    messages = messages_of(items, toolbox)
    most = host.limits.max_messages
    if len(messages) > most:
        raise error_texts.too_many("messages", len(messages), most, "input")
    chat = chat_fields(request, messages, toolbox)
    wanted = None if request.text is None else request.text.format
    output_format = text_format(None if isinstance(wanted, TextFormat) else wanted, "text.format", host.limits)
    prompt = render(host, chat, None if output_format is None else output_format.prompt_format)
    if request.truncation == "auto" and len(prompt.tokens) >= host.max_model_len:
        chat, prompt = _shortened(host, chat, output_format, request.max_output_tokens)
    return ResponsePrompt(prompt, chat, output_format, items)


# ---- a conversation that is too long ---------------------------------------------------------------------------------


def _shortened(
    host: Host, chat: ChatFields, output_format: OutputFormat | None, max_output_tokens: int | None
) -> tuple[ChatFields, ChatPrompt]:
    """Drop as few of the oldest messages as possible. Instructions and the end always stay."""
    reserve = host.max_model_len // RESERVE
    room = host.max_model_len - max(1, min(max_output_tokens or reserve, reserve))
    low, high = 0, sum(not _instructs(message) for message in chat.messages[: _end(chat.messages)])

    def without(num_dropped: int) -> tuple[ChatFields, ChatPrompt]:
        shorter = chat.model_copy(update={"messages": without_oldest(chat.messages, num_dropped)})
        return shorter, render(host, shorter, None if output_format is None else output_format.prompt_format)

    best = without(high)
    while low < high:
        middle = (low + high) // 2
        tried = without(middle)
        if len(tried[1].tokens) <= room:
            best, high = tried, middle
        else:
            low = middle + 1
    return best


def _end(messages: Sequence[ChatMessage]) -> int:
    """Where the part begins that must stay: the last message, and the call that it answers."""
    last = len(messages) - 1
    answered = messages[last]
    if isinstance(answered, ToolMessage):
        for at in range(last, -1, -1):
            message = messages[at]
            calls = message.tool_calls or () if isinstance(message, AssistantMessage) else ()
            if any(call.id == answered.tool_call_id for call in calls):
                return at
    return last


def without_oldest(messages: Sequence[ChatMessage], num_dropped: int) -> list[ChatMessage]:
    """Drop the oldest messages that are not instructions, and results of calls that were dropped."""
    kept: list[ChatMessage] = []
    called: set[str] = set()
    for message in messages:
        if not _instructs(message) and num_dropped:
            num_dropped -= 1
            continue
        if isinstance(message, AssistantMessage):
            called |= {call.id for call in message.tool_calls or ()}
        if not isinstance(message, ToolMessage) or message.tool_call_id in called:
            kept.append(message)
    return kept


def _instructs(message: ChatMessage) -> bool:
    return isinstance(message, TextMessage) and message.role != "user"


# ---- errors ----------------------------------------------------------------------------------------------------------

PLACE = re.compile(r"\btools\[(\d+)\](?:\.function)?")


@contextmanager
def named_as_sent(toolbox: Toolbox) -> Iterator[None]:
    """Errors about chat fields get the names that the fields have in this request."""
    try:
        yield
    except BadField as error:
        param = None if error.param is None else _as_sent(error.param, toolbox)
        param = "input" if param in ("messages", "prompt") else param
        raise BadField(_as_sent(str(error), toolbox), param, error.code) from None


def _as_sent(text: str, toolbox: Toolbox) -> str:
    def place(match: re.Match[str]) -> str:
        at = int(match[1])
        return toolbox.offered[at].where if at < len(toolbox.offered) else match[0]

    return PLACE.sub(place, text.replace("messages[", "input["))
