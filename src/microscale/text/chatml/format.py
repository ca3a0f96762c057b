"""ChatML as a ``ChatFormat``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Self

from microscale.text.chat_format import ChatFormat
from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml import tokens as names
from microscale.text.chatml.parser import ChatmlParser
from microscale.text.chatml.render import ChatmlRenderer, is_thinking
from microscale.text.conversation import Message, Rendered, RenderOptions
from microscale.text.grammar import Form, Turn, alone, named
from microscale.text.tokenizer import Tokenizer


class Thoughts(Enum):
    """How much of the turn's reasoning is in the prompt."""

    NONE = 0
    OPEN = 1
    CLOSED = 2


_BEFORE = {
    Thoughts.NONE: f"({names.THINK} TEXT {names.END_THINK} gap?)?",
    Thoughts.OPEN: f"TEXT {names.END_THINK} gap?",
    Thoughts.CLOSED: "",
}


def of_turn(turn: Turn, thoughts: Thoughts = Thoughts.NONE) -> str:
    """The grammar of what the model writes after a prompt that ends in its turn.

        start ── reasoning, free ──┬── answer: free text or a form ───────────────── <|im_end|>
                                   └── text, if the answer is free ── calls: forms ─┘

    Control tokens are terminals. If the prompt begins the reasoning, the grammar begins inside or after it.
    """
    answer = "ANSWER" if turn.answer is None else "@answer"
    ways = [] if turn.must_call else [answer]
    rules = [r"TEXT: /(.|\n)*/", r"ANSWER: /(.|\n)+/", r'gap: "\n\n" | "\n"']
    forms = [] if turn.answer is None else [named("answer", turn.answer)]
    if turn.calls:
        # Other text would break an answer's form; and if a call is required, it might never come.
        before = "ANSWER? " if turn.answer is None and not turn.must_call else ""
        ways.append(before + ("call" if turn.one_call else r'call ("\n" call)*'))
        rules += _calls(turn.calls)
        forms += [named(f"arguments_{number}", form) for number, form in enumerate(turn.calls.values())]
    start = f"start: {_BEFORE[thoughts]} ({' | '.join(ways)}) {names.END}"
    grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join([start, *rules])}, *forms]
    return json.dumps({"grammars": grammars})


def _calls(calls: Mapping[str, Form]) -> list[str]:
    """One rule per function that may be called."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(calls)))]
    for number, function in enumerate(calls):
        head = json.dumps(f'\n{{"name": {json.dumps(function)}, "arguments": ')
        rules.append(f'call_{number}: {names.CALL} {head} @arguments_{number} "}}\\n" {names.END_CALL}')
    return rules


class ChatmlFormat(ChatFormat):
    """A turn may have several calls, and ends like an answer. Nothing is added before a raw prompt."""

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
        """With the template next to the tokenizer."""
        return cls(tokenizer, ChatTemplate.load(Path(tokenizer.source).parent))

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        return self._renderer.rendered(conversation, options)

    def parser(self, tools: Collection[str] | None = None) -> ChatmlParser:
        return ChatmlParser(self._tokens, tools)

    def turn(self, message: Message) -> list[int]:
        return self._renderer.turn(message)

    def shows(self, prompt: str, question: str) -> bool:
        asked = f"{names.START}user\n{question}{names.END}\n{names.START}assistant\n"
        # The template decides what comes before the question, and how the answer begins.
        return asked in prompt

    def turn_grammar(self, turn: Turn) -> str:
        if is_thinking(turn.begun, self._tokens):
            return of_turn(turn, Thoughts.OPEN)
        return of_turn(turn, Thoughts.CLOSED if turn.begun else Thoughts.NONE)

    def text_grammar(self, form: Form) -> str:
        ends = (names.END, names.END_OF_TEXT)
        return alone(form, [name for name in ends if name in self.tokenizer.control])
