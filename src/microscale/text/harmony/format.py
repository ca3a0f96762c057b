"""Harmony as a ``ChatFormat``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

from microscale.text.chat_format import ChatFormat
from microscale.text.conversation import Message, Rendered, RenderOptions
from microscale.text.grammar import Form, Turn, alone
from microscale.text.harmony import tokens as names
from microscale.text.harmony.grammar import of_turn
from microscale.text.harmony.parser import HarmonyParser
from microscale.text.harmony.render import HarmonyRenderer
from microscale.text.tokenizer import Tokenizer


class HarmonyFormat(ChatFormat):
    """A turn ends with its first call. Nothing stands before a raw prompt."""

    CONTROL = (*names.NAMES, names.END_OF_TEXT)
    ANSWER_END = names.RETURN
    CALL_END = names.CALL

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._renderer = HarmonyRenderer(tokenizer)
        self._tokens = self._renderer.tokens
        super().__init__(tokenizer, self._tokens.stops)

    @classmethod
    def fits(cls, tokenizer: Tokenizer) -> bool:
        return names.CHANNEL in tokenizer.control

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        return cls(tokenizer)

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        return self._renderer.rendered(conversation, options)

    def parser(self, tools: Collection[str] | None = None) -> HarmonyParser:
        return HarmonyParser(self._tokens, tools)

    def turn(self, message: Message) -> list[int]:
        return self._renderer.turn(message)

    def shows(self, prompt: str, question: str) -> bool:
        asked = f"{names.START}user{names.MESSAGE}{question}{names.END}{names.START}assistant"
        return prompt.startswith(f"{names.START}system{names.MESSAGE}") and prompt.endswith(asked)

    def turn_grammar(self, turn: Turn) -> str:
        return of_turn(turn)

    def text_grammar(self, form: Form) -> str:
        ends = (names.RETURN, names.END_OF_TEXT)
        return alone(form, [name for name in ends if name in self.tokenizer.control])
