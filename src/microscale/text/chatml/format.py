"""ChatML as a ``ChatFormat``.

A template may end the prompt inside the assistant's turn: with empty reasoning if none is wanted, or with open
reasoning for models that always think. That part is ``Rendered.begun``. Its text also shows the style of calls.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml import tokens as names
from microscale.text.chatml.call import CallStyle
from microscale.text.chatml.json_call import JSON
from microscale.text.chatml.parser import ChatmlParser
from microscale.text.chatml.tokens import ChatmlTokens
from microscale.text.chatml.xml_call import MARK, XML
from microscale.text.conversation import Message, PromptEnd, Rendered, RenderOptions, Tool, open_message
from microscale.text.grammar import Form, Schema, Turn, alone, named
from microscale.text.template_format import TemplateFormat
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


def of_turn(turn: Turn, style: CallStyle, thoughts: Thoughts = Thoughts.NONE) -> str:
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
        calls = [style.grammar(number, *call) for number, call in enumerate(turn.calls.items())]
        bodies = " | ".join(f"call_{number}" for number in range(len(calls)))
        rules.append(f'call: {names.CALL} "\\n" ({bodies}) "\\n" {names.END_CALL}')
        rules += [f"call_{number}: {call.body}" for number, call in enumerate(calls)]
        # Functions may share rules.
        rules += dict.fromkeys(rule for call in calls for rule in call.rules)
        forms += [form for call in calls for form in call.forms]
    start = f"start: {_BEFORE[thoughts]} ({' | '.join(ways)}) {names.END}"
    grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join([start, *rules])}, *forms]
    return json.dumps({"grammars": grammars})


class ChatmlFormat(TemplateFormat):
    """A turn may have several calls, and ends like an answer. Nothing is added before a raw prompt."""

    MARK = names.START
    EOS = names.END
    CONTROL = (*names.NAMES, names.END_OF_TEXT)
    ANSWER_END = names.END
    CALL_END = names.END_CALL

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokens = ChatmlTokens.of(tokenizer)
        self._style = XML if MARK in template.source else JSON
        super().__init__(tokenizer, template, self._tokens.stops)

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        if options.end is PromptEnd.OPEN:
            return self._continued(*open_message(conversation), options)
        ids = self._render(conversation, options)
        begun = [] if options.end is PromptEnd.CLOSED else self._begun(ids)
        return Rendered(ids, tuple(begun))

    def _render(self, conversation: Sequence[Message], options: RenderOptions) -> list[int]:
        renderable = self._style.renderable
        messages = [replace(each, tool_calls=tuple(map(renderable, each.tool_calls))) for each in conversation]
        return super()._render(messages, options)

    def _continued(self, before: Sequence[Message], last: Message, options: RenderOptions) -> Rendered:
        """A prompt that ends inside ``last``, an incomplete assistant message."""
        ids = self._render(before, options)
        begun = self._begun(ids)
        ids = ids[: len(ids) - len(begun)]
        if last.reasoning:
            begun = self._thoughts(last.reasoning, closed=bool(last.content))
        elif is_thinking(begun, self._tokens):
            begun = self._thoughts("", closed=True)
        # Without trailing line breaks: the parser would hold them back and show them with the first token.
        shown = self._encode(last.content.rstrip("\n"))
        return Rendered([*ids, *begun, *self._encode(last.content)], (*begun, *shown))

    def _begun(self, ids: Sequence[int]) -> list[int]:
        """The reasoning that the template wrote in the prompt's last turn."""
        begin = max((at for at, token in enumerate(ids) if token == self._tokens.start), default=len(ids))
        turn = list(ids[begin:])
        return turn[turn.index(self._tokens.think) :] if self._tokens.think in turn else []

    def _thoughts(self, text: str, *, closed: bool) -> list[int]:
        if not closed:
            return [self._tokens.think, *self._encode(f"\n{text}")]
        return [self._tokens.think, *self._encode(f"\n{text}\n"), self._tokens.end_think, *self._encode("\n\n")]

    def parser(self, tools: Collection[Tool] | None = None) -> ChatmlParser:
        return ChatmlParser(self._tokens, tools, self._style.reader)

    def turn(self, message: Message) -> list[int]:
        ids = self._thoughts(message.reasoning, closed=True) if message.reasoning else []
        ids += self._encode(message.content)
        for number, call in enumerate(message.tool_calls):
            ids += self._encode("\n") if number or message.content else []
            ids += [self._tokens.call, *self._encode(f"\n{self._style.text(call)}\n"), self._tokens.end_call]
        return [*ids, self._tokens.end]

    def shows(self, prompt: str, question: str) -> bool:
        asked = f"{names.START}user\n{question}{names.END}\n{names.START}assistant\n"
        # The template decides what comes before the question, and how the answer begins.
        return asked in prompt

    def turn_grammar(self, turn: Turn) -> str:
        if is_thinking(turn.begun, self._tokens):
            return of_turn(turn, self._style, Thoughts.OPEN)
        return of_turn(turn, self._style, Thoughts.CLOSED if turn.begun else Thoughts.NONE)

    def why_not_strict(self, form: Schema) -> str | None:
        return self._style.why_not_strict(form)

    def text_grammar(self, form: Form) -> str:
        ends = (names.END, names.END_OF_TEXT)
        return alone(form, [name for name in ends if name in self.tokenizer.control])


def is_thinking(begun: Sequence[int], tokens: ChatmlTokens) -> bool:
    """Whether the part of the turn in the prompt ends inside unclosed reasoning."""
    marks = [token for token in begun if token in (tokens.think, tokens.end_think)]
    return bool(marks) and marks[-1] == tokens.think
