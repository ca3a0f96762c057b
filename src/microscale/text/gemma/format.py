"""Gemma 4's chat format as a ``ChatFormat``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

from microscale.text.chat_format import ChatFormat
from microscale.text.chat_template import ChatTemplate
from microscale.text.conversation import Message, Rendered, RenderOptions
from microscale.text.gemma import tokens as names
from microscale.text.gemma.grammar import of_turn
from microscale.text.gemma.parser import GemmaParser
from microscale.text.gemma.render import GemmaRenderer
from microscale.text.grammar import Form, Turn, alone
from microscale.text.tokenizer import Tokenizer


class GemmaFormat(ChatFormat):
    """A turn may hold several calls. ``<bos>`` stands before a raw prompt."""

    CONTROL = (names.EOS, names.BOS, *names.NAMES)
    ANSWER_END = names.END_TURN
    CALL_END = names.END_CALL
    FREE_ARGUMENTS = "this model does not write arguments as JSON"

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._renderer = GemmaRenderer(tokenizer, template)
        self._tokens = self._renderer.tokens
        super().__init__(tokenizer, self._tokens.stops)

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        return names.TURN in tokenizer.control

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """With the template that lies beside the tokenizer."""
        return cls(tokenizer, ChatTemplate.load(Path(tokenizer.source).parent))

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        return self._renderer.rendered(conversation, options)

    def added_to(self, text: str) -> tuple[int, ...]:
        bos = self.tokenizer.control.get(names.BOS)
        return () if bos is None or text.startswith(names.BOS) else (bos,)

    def parser(self, tools: Collection[str] | None = None) -> GemmaParser:
        return GemmaParser(self._tokens, tools)

    def turn(self, message: Message) -> list[int]:
        return self._renderer.turn(message)

    def shows(self, prompt: str, question: str) -> bool:
        # What stands around the question is the template's affair.
        return question in prompt

    def turn_grammar(self, turn: Turn) -> str:
        return of_turn(turn)

    def text_grammar(self, form: Form) -> str:
        return alone(form, [names.EOS if names.EOS in self.tokenizer.control else names.END_TURN])
