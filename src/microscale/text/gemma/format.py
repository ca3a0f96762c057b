"""Gemma 4's chat format as a ``ChatFormat``."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Self

from microscale.text.chat_format import ChatFormat
from microscale.text.chat_template import ChatTemplate
from microscale.text.conversation import Message, Rendered, RenderOptions
from microscale.text.gemma import tokens as names
from microscale.text.gemma.parser import THOUGHT, GemmaParser
from microscale.text.gemma.render import GemmaRenderer
from microscale.text.grammar import Form, Turn, alone, named
from microscale.text.tokenizer import Tokenizer

# The grammar of a call's arguments. Texts end at a quote token.
_VALUES = rf"""
object: "{{" (pair ("," pair)*)? "}}"
array: "[" (value ("," value)*)? "]"
pair: KEY ":" value
value: {names.QUOTE} TEXT {names.QUOTE} | NUMBER | "true" | "false" | "null" | object | array
KEY: /[A-Za-z_][A-Za-z0-9_.-]{{0,63}}/
NUMBER: /-?(0|[1-9][0-9]{{0,29}})(\.[0-9]{{1,30}})?([eE][+-]?[0-9]{{1,3}})?/
TEXT: /(.|\n)*/
ANSWER: /(.|\n)+/
"""


def of_turn(turn: Turn) -> str:
    """The grammar of what the model writes after a prompt that ends in its turn.

        start ── reasoning, free ──┬── answer: free text or a form ── <turn|>
                                   └── calls of offered functions ─── <|tool_response>

    Arguments are in Gemma's own spelling and not JSON, so a schema cannot constrain them: calls are well formed and of
    an offered function, and their arguments are free.
    """
    calls = list(turn.calls or {})
    ways = [] if turn.must_call else ["final"]
    ways += [f"{'call' if turn.one_call else 'call+'} {names.RESPONSE}"] if calls else []
    answer = "ANSWER" if turn.answer is None else "@answer"
    rules = [
        f"start: aside? ({' | '.join(ways)})",
        f"aside: {names.CHANNEL} {json.dumps(THOUGHT + chr(10))} TEXT {names.END_CHANNEL}",
        f"final: {answer} {names.END_TURN}",
    ]
    if calls:
        offered = " | ".join(json.dumps(f"call:{function}") for function in calls)
        rules.append(f"call: {names.CALL} ({offered}) object {names.END_CALL}")
        rules.append(_VALUES)
    else:
        rules.append("TEXT: /(.|\\n)*/\nANSWER: /(.|\\n)+/")
    forms = [] if turn.answer is None else [named("answer", turn.answer)]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *forms]})


class GemmaFormat(ChatFormat):
    """A turn may have several calls. ``<bos>`` is added before a raw prompt."""

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
        """With the template next to the tokenizer."""
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
        # The template decides what surrounds the question.
        return question in prompt

    def turn_grammar(self, turn: Turn) -> str:
        return of_turn(turn)

    def text_grammar(self, form: Form) -> str:
        return alone(form, [names.EOS if names.EOS in self.tokenizer.control else names.END_TURN])
