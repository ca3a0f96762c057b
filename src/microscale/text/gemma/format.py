"""Gemma 4's chat format as a ``ChatFormat``."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from microscale.text.chat_template import ChatTemplate
from microscale.text.conversation import Message, PromptEnd, Rendered, RenderOptions, Tool, open_message
from microscale.text.gemma import tokens as names
from microscale.text.gemma.call import QUOTE, call_text
from microscale.text.gemma.parser import THOUGHT, GemmaParser
from microscale.text.gemma.tokens import GemmaTokens
from microscale.text.grammar import ANY_OBJECT, Form, Schema, Turn, alone, named
from microscale.text.template_format import TemplateFormat
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


class GemmaFormat(TemplateFormat):
    """A turn may have several calls. ``<bos>`` is added before a raw prompt."""

    MARK = names.TURN
    BOS, EOS = names.BOS, names.EOS
    CONTROL = (names.EOS, names.BOS, *names.NAMES)
    ANSWER_END = names.END_TURN
    CALL_END = names.END_CALL

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        self._tokens = GemmaTokens.of(tokenizer)
        super().__init__(tokenizer, template, self._tokens.stops)

    def rendered(self, conversation: Sequence[Message], options: RenderOptions) -> Rendered:
        if options.end is not PromptEnd.OPEN:
            return Rendered(self._render(conversation, options))
        before, last = open_message(conversation)
        begun = self._thoughts(last.reasoning, closed=bool(last.content)) if last.reasoning else []
        begun += self._encode(last.content)
        return Rendered(self._render(before, options) + begun, tuple(begun))

    def _thoughts(self, text: str, *, closed: bool) -> list[int]:
        if not closed:
            return [self._tokens.channel, *self._encode(f"{THOUGHT}\n{text}")]
        return [self._tokens.channel, *self._encode(f"{THOUGHT}\n{text}\n"), self._tokens.end_channel]

    def added_to(self, text: str) -> tuple[int, ...]:
        bos = self.tokenizer.control.get(names.BOS)
        return () if bos is None or text.startswith(names.BOS) else (bos,)

    def parser(self, tools: Collection[Tool] | None = None) -> GemmaParser:
        return GemmaParser(self._tokens, tools)

    def turn(self, message: Message) -> list[int]:
        ids = self._thoughts(message.reasoning, closed=True) if message.reasoning else []
        ids += self._encode(message.content)
        for call in message.tool_calls:
            ids += [self._tokens.call, *self._quoted(call_text(call.name, call.arguments)), self._tokens.end_call]
        return [*ids, self._tokens.response if message.tool_calls else self._tokens.end_turn]

    def _quoted(self, text: str) -> list[int]:
        """Encode text in which ``QUOTE`` represents the quote token."""
        first, *others = text.split(QUOTE)
        ids = self._encode(first)
        for other in others:
            ids += [self._tokens.quote, *self._encode(other)]
        return ids

    def shows(self, prompt: str, question: str) -> bool:
        # The template decides what surrounds the question.
        return question in prompt

    def turn_grammar(self, turn: Turn) -> str:
        return of_turn(turn)

    def arguments_grammar(self, form: Schema) -> str:
        return super().arguments_grammar(ANY_OBJECT)

    def why_not_strict(self, form: Schema) -> str | None:
        return "this model does not write arguments as JSON"

    def text_grammar(self, form: Form) -> str:
        return alone(form, [names.EOS if names.EOS in self.tokenizer.control else names.END_TURN])
