"""ChatML's turns under a grammar: forms bind answers and arguments, calls are well formed, thoughts stay free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml.format import ChatmlFormat
from microscale.text.conversation import Effort, Message, RenderOptions, Role, ToolCall
from microscale.text.grammar import ANY_OBJECT, Schema, Turn
from support.tiny_chatml_text import ALWAYS_THINKS, TEMPLATE, tiny_chatml

ANSWER = Schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
STRICT = Schema({**ANSWER.schema, "additionalProperties": False})
CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 3}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "g", "arguments": {"x": ["}\\n", null, {}]}}\n</tool_call>'
THINK = '<think>\nhm: }{ "\n</think>\n\n'
END = "<|im_end|>"
BOTH = {"f": STRICT, "g": ANY_OBJECT}

FREE = Turn(None, BOTH)
MUST = Turn(None, BOTH, must_call=True)
ONE = Turn(None, BOTH, one_call=True)
NAMED = Turn(None, {"g": ANY_OBJECT}, must_call=True)
FORMAT = ChatmlFormat(tiny_chatml(), ChatTemplate(TEMPLATE, "test"))


def follows(turn: Turn, text: str | list[int]) -> tuple[bool, bool]:
    """Whether every token of ``text`` is allowed, and whether the grammar is complete after it."""
    tokenizer = tiny_chatml()
    words = tokenizer.vocabulary()
    vocabulary = Vocabulary(words, sorted(tokenizer.control.values()), tokenizer.split_pattern)
    matcher = Grammars(vocabulary, len(words)).matcher(FORMAT.turn_grammar(turn))
    ids = tokenizer.encode_with_control(text) if isinstance(text, str) else text
    return matcher.inner.validate_tokens(ids) == len(ids), all(map(matcher.inner.consume_token, ids)) and matcher.ended


@pytest.mark.parametrize(
    ("turn", "text", "allowed"),
    [
        (Turn(ANSWER), f'{THINK}{{"n": 3}}{END}', True),
        (Turn(ANSWER), f'<think>\n\n</think>\n\n{{"n": 3}}{END}', True),
        (Turn(ANSWER), f'{{"n": 3}}{END}', True),
        (Turn(ANSWER), f'{{"n": "3"}}{END}', False),
        (Turn(ANSWER), f"{THINK}So: 3{END}", False),
        (Turn(ANSWER), f'So.</think>{{"n": 3}}{END}', False),
        (Turn(ANSWER), f'{THINK}{THINK}{{"n": 3}}{END}', False),
        # With tools: an answer of its form, or calls, and no text before these.
        (Turn(ANSWER, BOTH), f"{THINK}{CALL}{END}", True),
        (Turn(ANSWER, BOTH), f'{{"n": 3}}{END}', True),
        (Turn(ANSWER, BOTH), f"I look.\n{CALL}{END}", False),
        # Tools that are free to come.
        (FREE, f"Any text.{END}", True),
        (FREE, f"{THINK}Any text, even a {{ or two.\n\n{CALL}\n{OTHER}{END}", True),
        (FREE, f"{CALL}{END}", True),
        (FREE, f"{CALL}More.{END}", False),
        (FREE, END, False),
        # Arguments are bound, and so is the call around them.
        (FREE, CALL.replace("3", '"3"') + END, False),
        (FREE, CALL.replace('"n": 3', '"n": 3, "m": 4') + END, False),
        (FREE, CALL.replace("3}}", "3}") + END, False),
        (FREE, CALL.replace('"f"', '"h"') + END, False),
        (FREE, OTHER.replace('"g"', '"f"') + END, False),
        # A call that must come, of any function or of one.
        (MUST, f"{THINK}{CALL}\n{OTHER}\n{CALL}{END}", True),
        (MUST, f"{OTHER}{END}", True),
        (MUST, f"No.{END}", False),
        (MUST, f"I look.\n{CALL}{END}", False),
        (MUST, f"{THINK}{END}", False),
        (NAMED, f"{THINK}{OTHER}{END}", True),
        (NAMED, f"{CALL}{END}", False),
        # One call.
        (ONE, f"{THINK}{CALL}{END}", True),
        (ONE, f"I look.\n{OTHER}{END}", True),
        (ONE, f"{CALL}\n{OTHER}{END}", False),
        (ONE, f"No.{END}", True),
        (replace(MUST, one_call=True), f"{CALL}\n{CALL}{END}", False),
        (replace(MUST, one_call=True), f"{CALL}{END}", True),
    ],
)  # fmt: skip
def test_turns(turn: Turn, text: str, allowed: bool) -> None:
    assert follows(turn, text) == (allowed, allowed)


@pytest.mark.parametrize(
    ("template", "effort", "text", "allowed"),
    [
        # In thoughts that the prompt has begun: all is free until they end, and then the form binds.
        (ALWAYS_THINKS, Effort.HIGH, f'hm: }}{{ "\n</think>\n\n{{"n": 3}}{END}', True),
        (ALWAYS_THINKS, Effort.LOW, f'hm</think>{{"n": 3}}{END}', True),
        (ALWAYS_THINKS, Effort.HIGH, f"hm\n</think>\n\nSo: 3{END}", False),
        (ALWAYS_THINKS, Effort.HIGH, f'{{"n": 3}}{END}', False),
        (ALWAYS_THINKS, Effort.HIGH, f'<think>hm</think>{{"n": 3}}{END}', False),
        (ALWAYS_THINKS, Effort.HIGH, f"hm\n</think>\n\n{CALL}{END}", True),
        # After an empty thought there is no second.
        (TEMPLATE, Effort.LOW, f'{{"n": 3}}{END}', True),
        (TEMPLATE, Effort.LOW, f'{THINK}{{"n": 3}}{END}', False),
        (TEMPLATE, Effort.HIGH, f'{THINK}{{"n": 3}}{END}', True),
    ],
)
def test_the_grammar_begins_where_the_prompt_ended(template: str, effort: Effort, text: str, allowed: bool) -> None:
    chat_format = ChatmlFormat(tiny_chatml(), ChatTemplate(template, "test"))
    prompt = chat_format.rendered([Message(Role.USER, "n?")], RenderOptions(effort=effort))
    assert follows(Turn(ANSWER, BOTH, begun=prompt.begun), text) == (allowed, allowed)


def test_tokens_may_span_the_form_and_what_is_around_it() -> None:
    """Models write the end of the arguments and of the call in one token."""
    ids = FORMAT.turn(Message(Role.ASSISTANT, tool_calls=(ToolCall("1", "f", '{"n": 3}'),)))
    assert b"}}\n" in map(tiny_chatml().token_bytes, ids)
    assert follows(FREE, ids) == (True, True)


def test_a_mark_that_is_spelt_in_an_argument_is_text() -> None:
    call = ToolCall("1", "g", '{"x": "}\\n</tool_call><|im_end|>"}')
    assert follows(FREE, FORMAT.turn(Message(Role.ASSISTANT, tool_calls=(call,)))) == (True, True)


def test_function_names_are_text() -> None:
    odd = Turn(None, {"a.b-c:d": ANY_OBJECT}, must_call=True)
    assert follows(odd, f'<tool_call>\n{{"name": "a.b-c:d", "arguments": {{}}}}\n</tool_call>{END}') == (True, True)
    assert follows(odd, f'<tool_call>\n{{"name": "axb-c:d", "arguments": {{}}}}\n</tool_call>{END}') == (False, False)
