"""ChatML as a ``ChatFormat``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

from microscale.text.chat_format import ChatFormat
from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml import tokens as names
from microscale.text.chatml.grammar import Thoughts, of_turn
from microscale.text.chatml.parser import ChatmlParser
from microscale.text.chatml.render import ChatmlRenderer, is_thinking
from microscale.text.conversation import Message, Rendered, RenderOptions
from microscale.text.grammar import Form, Turn, alone
from microscale.text.tokenizer import Tokenizer


class ChatmlFormat(ChatFormat):
    """A turn may hold several calls, and ends as an answer does. Nothing stands before a raw prompt."""

    CONTROL = (*names.NAMES, names.END_OF_TEXT)
    ANSWER_END = names.END
    CALL_END = names.END_CALL

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._renderer = ChatmlRenderer(tokenizer, template)
        self._tokens = self._renderer.tokens
        super().__init__(tokenizer, self._tokens.stops)

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        return names.START in tokenizer.control

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """With the template that lies beside the tokenizer."""
        return cls(tokenizer, ChatTemplate.load(Path(tokenizer.source).parent))

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        return self._renderer.rendered(conversation, options)

    def parser(self, tools: Collection[str] | None = None) -> ChatmlParser:
        return ChatmlParser(self._tokens, tools)

    def turn(self, message: Message) -> list[int]:
        return self._renderer.turn(message)

    def shows(self, prompt: str, question: str) -> bool:
        asked = f"{names.START}user\n{question}{names.END}\n{names.START}assistant\n"
        # What stands before the question, and what is begun of the answer, is the template's affair.
        return asked in prompt

    def turn_grammar(self, turn: Turn) -> str:
        if is_thinking(turn.begun, self._tokens):
            return of_turn(turn, Thoughts.OPEN)
        return of_turn(turn, Thoughts.CLOSED if turn.begun else Thoughts.NONE)

    def text_grammar(self, form: Form) -> str:
        ends = (names.END, names.END_OF_TEXT)
        return alone(form, [name for name in ends if name in self.tokenizer.control])
