"""Harmony as a ``ChatFormat``."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Self

from microscale.text.chat_format import ChatFormat
from microscale.text.conversation import Message, Rendered, RenderOptions, Tool
from microscale.text.grammar import Form, Turn, alone, named
from microscale.text.harmony import tokens as names
from microscale.text.harmony.header import NAMESPACE
from microscale.text.harmony.parser import HarmonyParser
from microscale.text.harmony.render import HarmonyRenderer
from microscale.text.tokenizer import Tokenizer


def of_turn(turn: Turn) -> str:
    """The grammar of what the model writes after ``<|start|>assistant``.

        start ── analysis messages, free ──┬── final answer: free text or a form ────── <|return|>
                                           └── call of an offered function: its form ── <|call|>

    Control tokens are terminals, so headers are correct too. A turn ends with its first call.
    """
    calls = list((turn.calls or {}).items())
    ways = [] if turn.must_call else ["final"]
    ways += [f"call_{number}" for number in range(len(calls))]
    again = f'{names.END} {names.START} "assistant"'
    typed = f'(" "? {names.CONSTRAIN} "json" | " json")?'
    # A preamble is content, which would break an answer's form.
    aside = '"analysis"' if turn.answer is not None else '("analysis" | "commentary")'
    answer = "ANSWER" if turn.answer is None else "@answer"
    rules = [
        f"start: aside* ({' | '.join(ways)})",
        f"aside: {names.CHANNEL} {aside} {names.MESSAGE} TEXT {again}",
        f'final: {names.CHANNEL} "final" {typed} {names.MESSAGE} {answer} {names.RETURN}',
        r"TEXT: /(.|\n)*/",
        r"ANSWER: /(.|\n)+/",
    ]
    forms = [] if turn.answer is None else [named("answer", turn.answer)]
    for number, (function, form) in enumerate(calls):
        to = json.dumps(f"commentary to={NAMESPACE}{function}")
        body = f"{names.MESSAGE} @arguments_{number} {names.CALL}"
        rules.append(f"call_{number}: {names.CHANNEL} {to} {typed} {body}")
        forms.append(named(f"arguments_{number}", form))
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *forms]})


class HarmonyFormat(ChatFormat):
    """A turn ends with its first call. Nothing is added before a raw prompt."""

    MARK = names.CHANNEL
    CONTROL = (*names.NAMES, names.END_OF_TEXT)
    ANSWER_END = names.RETURN
    CALL_END = names.CALL

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._renderer = HarmonyRenderer(tokenizer)
        self._tokens = self._renderer.tokens
        super().__init__(tokenizer, self._tokens.stops)

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        return cls(tokenizer)

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        return self._renderer.rendered(conversation, options)

    def parser(self, tools: Collection[Tool] | None = None) -> HarmonyParser:
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
