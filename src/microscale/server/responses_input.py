"""A Responses request as a chat: items become messages, flat tools the chat's, so that both APIs have one way in."""

from __future__ import annotations

from collections.abc import Sequence

from microscale.server.protocol import (
    AssistantMessage,
    ChatFields,
    ChatMessage,
    Function,
    FunctionCall,
    FunctionName,
    Instruction,
    NamedTool,
    PastCall,
    SamplingFields,
    ToolMessage,
    ToolSpec,
)
from microscale.server.responses_protocol import (
    CallItem,
    CallOutputItem,
    InputMessage,
    InputText,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
)
from microscale.server.responses_replies import CallItem as SaidCall
from microscale.server.responses_replies import Item as SaidItem
from microscale.server.responses_replies import ReasoningItem as SaidReasoning


class Folder:
    """Folds items into messages: what an assistant thinks, says and calls in one go is one message of the chat."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._reasoning: list[str] = []
        self._content: str | None = None
        self._calls: list[PastCall] = []

    def think(self, text: str) -> None:
        if self._content is not None or self._calls:
            self._flush()
        self._reasoning.append(text)

    def say(self, text: str) -> None:
        if self._content is not None or self._calls:
            self._flush()
        self._content = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        self._calls.append(PastCall(id=call_id, function=FunctionCall(name=name, arguments=arguments)))

    def add(self, message: ChatMessage) -> None:
        self._flush()
        self._messages.append(message)

    def messages(self) -> list[ChatMessage]:
        self._flush()
        return self._messages

    def _flush(self) -> None:
        if self._reasoning or self._content is not None or self._calls:
            message = AssistantMessage(
                role="assistant",
                content=self._content,
                reasoning="\n".join(self._reasoning) or None,
                tool_calls=self._calls or None,
            )
            self._messages.append(message)
        self._reasoning, self._content, self._calls = [], None, []


def new_messages(request: ResponsesRequest) -> list[ChatMessage]:
    """What the request adds to the conversation."""
    if isinstance(request.input, str):
        return [Instruction(role="user", content=request.input)]
    folder = Folder()
    for item in request.input:
        if isinstance(item, CallItem):
            folder.call(item.call_id, item.name, item.arguments)
        elif isinstance(item, CallOutputItem):
            folder.add(ToolMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id))
        elif isinstance(item, ReasoningItem):
            folder.think("\n".join(part.text for part in item.content or item.summary or []))
        elif item.role == "assistant":
            folder.say(_text(item.content))
        else:
            folder.add(_spoken(item))
    return folder.messages()


def said_messages(items: Sequence[SaidItem]) -> list[ChatMessage]:
    """What a response adds to the conversation."""
    folder = Folder()
    for item in items:
        if isinstance(item, SaidCall):
            folder.call(item.call_id, item.name, item.arguments)
        elif isinstance(item, SaidReasoning):
            folder.think(item.content[0].text)
        else:
            folder.say(item.content[0].text)
    return folder.messages()


def _spoken(item: InputMessage) -> Instruction:
    role = item.role
    assert role != "assistant"
    return Instruction(role=role, content=_text(item.content))


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def chat_fields(request: ResponsesRequest, messages: Sequence[ChatMessage]) -> ChatFields:
    choice = request.tool_choice
    specs = [
        ToolSpec(
            type="function",
            function=Function(
                name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
            ),
        )
        for tool in request.tools or []
    ]
    instructions: list[ChatMessage] = []
    if request.instructions:
        instructions.append(Instruction(role="developer", content=request.instructions))
    return ChatFields(
        messages=[*instructions, *messages],
        tools=specs or None,
        tool_choice=NamedTool(type="function", function=FunctionName(name=choice.name))
        if isinstance(choice, NamedFunction)
        else choice,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
    )


def sampling_fields(request: ResponsesRequest) -> SamplingFields:
    return SamplingFields(
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        top_k=request.top_k,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        cache_prompt=request.cache_prompt,
        cache_salt=request.cache_salt,
        priority=request.priority,
    )
