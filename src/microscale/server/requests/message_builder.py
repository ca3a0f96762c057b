"""From the parts of a conversation, as other APIs have them, to the chat's messages."""

from __future__ import annotations

from microscale.server.requests.messages import AssistantMessage, ChatMessage, FunctionCall, PastCall


class MessageBuilder:
    """Builds the chat's messages. What an assistant thinks, says and calls in one go becomes one of them."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._reasoning: list[str] = []
        self._content: str | None = None
        self._calls: list[PastCall] = []

    def think(self, text: str) -> None:
        if self._content is not None or self._calls:
            self._flush()
        if text:
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
