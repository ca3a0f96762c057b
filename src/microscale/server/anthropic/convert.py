"""A Messages request as a chat: blocks become messages, tools the chat's, so that every API has one way in."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from microscale.server.anthropic.protocol import (
    Block,
    BlocksSource,
    CountRequest,
    CustomTool,
    DocumentBlock,
    HostedTool,
    InputMessage,
    MessagesRequest,
    RedactedBlock,
    ResultBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from microscale.server.body import MANY, NAME, Ignored
from microscale.server.faults import BadField
from microscale.server.folder import Folder
from microscale.server.limits import Limits
from microscale.server.protocol import (
    AssistantMessage,
    ChatFields,
    ChatMessage,
    Function,
    FunctionName,
    Instruction,
    NamedTool,
    SamplingFields,
    SchemaFields,
    ToolMessage,
    ToolSpec,
)
from microscale.server.structured import Wish, schema_wish

Effort = Literal["low", "medium", "high"]
Display = Literal["shown", "omitted", "hidden"]
EFFORTS: dict[str, Effort] = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
LOW_BUDGET = 4096
"""Thinking tokens below which the effort is low."""
HIGH_BUDGET = 16384
"""Thinking tokens from which on it is high."""
INVALID = "INVALID_JSON"
"""The key of tool input that is no JSON object, as Anthropic's guide to streaming has it."""
CARRIED = "reasoning."
"""A signature that begins so carries the block's text."""
BILLING = "x-anthropic-billing-header:"
"""How Claude Code begins a system block that is meant for Anthropic's books. It differs from turn to turn in some
versions, and would keep the prefix cache from ever matching."""


def passed_over(request: CountRequest) -> Iterator[Ignored]:
    """What of the request is no unknown key, and is ignored all the same."""
    for tool in request.tools or ():
        if isinstance(tool, HostedTool):
            yield Ignored(f"tools.{tool.type if NAME.fullmatch(tool.type) else '?'}", False)
    if isinstance(request.system, list) and any(block.text.startswith(BILLING) for block in request.system):
        yield Ignored("system.x-anthropic-billing-header", True)


# ---- what comes back -------------------------------------------------------------------------------------------------


def effort_of(request: CountRequest) -> Effort | None:
    """By the table of this package's docstring."""
    thinking, config = request.thinking, request.output_config
    if thinking is not None and thinking.type == "disabled":
        return "low"
    if config is not None and config.effort is not None:
        return EFFORTS[config.effort]
    if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
        return None
    budget = thinking.budget_tokens
    return "low" if budget < LOW_BUDGET else "medium" if budget < HIGH_BUDGET else "high"


def display_of(request: CountRequest) -> Display:
    """What the client sees of the reasoning."""
    thinking = request.thinking
    if thinking is None or thinking.type == "disabled":
        return "hidden"
    return "omitted" if thinking.display == "omitted" else "shown"


def carrying(reasoning: str) -> str:
    """A signature that brings a text back that the client does not see."""
    return CARRIED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def _carried(signature: str | None) -> str:
    if signature is None or not signature.startswith(CARRIED):
        return ""
    try:
        return base64.urlsafe_b64decode(signature.removeprefix(CARRIED)).decode()
    except (binascii.Error, ValueError):
        return ""  # not ours


# ---- messages --------------------------------------------------------------------------------------------------------


def chat_fields(request: CountRequest, limits: Limits) -> ChatFields:
    messages = [*_instructions(request), *_conversation(request.messages)]
    most = min(limits.max_messages, MANY)
    if not messages:
        raise BadField("messages: nothing in them can be read.", "messages")
    if len(messages) > most:
        raise BadField(f"There are {len(messages)} messages; at most {most} are taken.", "messages")
    choice = request.tool_choice
    return ChatFields(
        messages=messages,
        tools=_specs(request) or None,
        tool_choice=_choice(request),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        reasoning_effort=effort_of(request),
        # Anthropic calls it a prefill.
        continue_final_message=isinstance(messages[-1], AssistantMessage),
    )


def _instructions(request: CountRequest) -> Iterator[ChatMessage]:
    system = request.system
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    text = "\n\n".join(text for text in texts if text and not text.startswith(BILLING))
    if text:
        yield Instruction(role="system", content=text)


def _conversation(messages: Sequence[InputMessage]) -> list[ChatMessage]:
    folder = Folder()
    for at, message in enumerate(messages):
        content = message.content
        blocks = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
        if message.role == "assistant":
            _fold_assistant(folder, blocks, f"messages[{at}].content")
        else:
            _fold_other(folder, message.role, blocks, f"messages[{at}].content")
    return folder.messages()


def _fold_assistant(folder: Folder, blocks: Sequence[Block], where: str) -> None:
    texts: list[str] = []
    for at, block in enumerate([*blocks, None]):
        if isinstance(block, TextBlock):
            texts += [block.text] if block.text else []
            continue
        if texts:
            folder.say("\n".join(texts))
            texts = []
        if isinstance(block, ThinkingBlock):
            if reasoning := block.thinking or _carried(block.signature):
                folder.think(reasoning)
        elif isinstance(block, ToolUseBlock):
            folder.call(block.id, block.name, arguments_of(block.input))
        elif block is not None and not isinstance(block, RedactedBlock):
            raise BadField(f"{where}[{at}]: an assistant's message has no {block.type}.", f"{where}[{at}]")


def _fold_other(folder: Folder, role: Literal["user", "system"], blocks: Sequence[Block], where: str) -> None:
    texts: list[str] = []
    for at, block in enumerate([*blocks, None]):
        if isinstance(block, TextBlock | DocumentBlock | SearchResultBlock):
            texts.append(_readable(block))
            continue
        if texts:
            folder.add(Instruction(role=role, content="\n".join(texts)))
            texts = []
        if isinstance(block, ToolResultBlock):
            folder.add(ToolMessage(role="tool", content=_result(block), tool_call_id=block.tool_use_id))
        elif block is not None:
            raise BadField(f"{where}[{at}]: a {role}'s message has no {block.type}.", f"{where}[{at}]")


def _result(block: ToolResultBlock) -> str:
    content = block.content or ""
    text = content if isinstance(content, str) else "\n".join(_readable(part) for part in content)
    # Chat formats have no mark for it.
    return f"Error: {text}" if block.is_error else text


def _readable(block: ResultBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(part.text for part in block.content)])
    if isinstance(block, ToolReferenceBlock):
        return block.tool_name
    assert isinstance(block, DocumentBlock), "all others are refused when they are read"
    source = block.source
    if isinstance(source, TextSource):
        text = source.data
    else:
        assert isinstance(source, BlocksSource)
        text = source.content if isinstance(source.content, str) else "\n".join(part.text for part in source.content)
    return "\n".join(filter(None, (block.title, block.context, text)))


# ---- tools -----------------------------------------------------------------------------------------------------------


def input_of(arguments: str) -> tuple[dict[str, Any], bool]:
    """A call's arguments as an object, and whether they are one."""
    if not arguments.strip():
        return {}, True
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = None
    return (value, True) if isinstance(value, dict) else ({INVALID: arguments}, False)


def arguments_of(value: dict[str, Any]) -> str:
    """A call's input as the model wrote it, or would have."""
    if len(value) == 1 and isinstance(text := value.get(INVALID), str):
        return text
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _custom(request: CountRequest) -> list[tuple[int, CustomTool]]:
    return [(at, tool) for at, tool in enumerate(request.tools or ()) if isinstance(tool, CustomTool)]


def _specs(request: CountRequest) -> list[ToolSpec]:
    return [
        ToolSpec(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for _, tool in _custom(request)
    ]


def _choice(request: CountRequest) -> Literal["none", "auto", "required"] | NamedTool | None:
    choice = request.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    name = choice.name or ""
    for tool in request.tools or ():
        if isinstance(tool, HostedTool) and name in (tool.name, tool.type):
            raise BadField(
                f"tool_choice names {name[:64]!r}, which this server does not run; only tools with an input_schema can "
                "be called.",
                "tool_choice",
            )
    return NamedTool(type="function", function=FunctionName(name=name))


def eager_tools(request: CountRequest) -> frozenset[str]:
    """The tools whose input is streamed as it is written."""
    return frozenset(tool.name for _, tool in _custom(request) if tool.eager_input_streaming)


# ---- the rest --------------------------------------------------------------------------------------------------------


def wish_of(request: CountRequest, limits: Limits) -> Wish | None:
    """The form that the answer shall have."""
    config = request.output_config
    new = None if config is None else config.format
    if new is not None and request.output_format is not None:
        raise BadField("output_config.format and output_format each ask for a form; give one.", "output_format")
    wanted, where = (new, "output_config.format") if new is not None else (request.output_format, "output_format")
    if wanted is None:
        return None
    # Strict: Anthropic promises the schema, so what cannot be kept is refused.
    fields = SchemaFields(name="answer", schema=wanted.schema_, strict=True)
    return schema_wish(fields, f"{where}.schema", limits)


def sampling_fields(request: MessagesRequest) -> SamplingFields:
    return SamplingFields(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        seed=request.seed,
        stop=request.stop_sequences,
        cache_prompt=request.cache_prompt,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )


RENAMED = (
    (".function.parameters", ".input_schema"),
    (".function.strict", ".strict"),
    ("continue_final_message", "messages: a last one of the assistant"),
)


def renamed(error: BadField, request: CountRequest) -> BadField:
    """The chat's fields under the names and numbers that they have here."""
    places = [at for at, _ in _custom(request)]

    def place(found: re.Match[str]) -> str:
        at = int(found[1])
        return f"tools[{places[at]}]" if at < len(places) else found[0]

    def here(text: str) -> str:
        for chat, own in RENAMED:
            text = text.replace(chat, own)
        text = re.sub(r"^stop\b", "stop_sequences", text)
        return re.sub(r"\btools\[(\d{1,5})\]", place, text)

    param = None if error.param is None else here(error.param).partition(":")[0]
    return BadField(here(str(error)), param, error.code)
