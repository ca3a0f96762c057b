"""Gemma's turns under a grammar: forms bind the answer, calls are well formed, thoughts stay free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from microscale.engine.grammar import Grammars, Vocabulary
from microscale.text.gemma.format import of_turn
from microscale.text.grammar import ANY_OBJECT, Schema, Turn
from support.tiny_gemma_text import tiny_gemma

ANSWER = Schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
CALL = '<|tool_call>call:f{a:<|"|>x}, "<|"|>,b:[1,-2.5,{c:null}]}<tool_call|>'

MUST = Turn(None, {"f": ANY_OBJECT}, must_call=True)
ONE = Turn(None, {"f": ANY_OBJECT}, one_call=True)


def follows(turn: Turn, text: str) -> tuple[bool, bool]:
    """Whether every token of ``text`` is allowed, and whether the grammar is complete after it."""
    tokenizer = tiny_gemma()
    words = tokenizer.vocabulary()
    grammars = Grammars(Vocabulary(words, sorted(tokenizer.control.values())), len(words))
    matcher = grammars.matcher(of_turn(turn))
    ids = tokenizer.encode_with_control(text)
    return matcher.inner.validate_tokens(ids) == len(ids), all(map(matcher.inner.consume_token, ids)) and matcher.ended


@pytest.mark.parametrize(
    ("turn", "text", "allowed"),
    [
        (Turn(ANSWER), '<|channel>thought\nhm: }{ "\n<channel|>{"n": 3}<turn|>', True),
        (Turn(ANSWER), '{"n": 3}<turn|>', True),
        (Turn(ANSWER), '{"n": "3"}<turn|>', False),
        (Turn(ANSWER), "3<turn|>", False),
        (Turn(ANSWER, {"f": ANY_OBJECT}), f"{CALL}<|tool_response>", True),
        (MUST, f"<|channel>thought\nhm<channel|>{CALL}{CALL}<|tool_response>", True),
        (MUST, "No.<turn|>", False),
        (ONE, f"<|channel>thought\nhm<channel|>{CALL}<|tool_response>", True),
        (ONE, f"{CALL}{CALL}<|tool_response>", False),
        (replace(MUST, one_call=True), f"{CALL}{CALL}<|tool_response>", False),
        (ONE, "No.<turn|>", True),
        (MUST, "<|tool_call>call:g{}<tool_call|>", False),
        (Turn(None, {"f": ANY_OBJECT}), "Any text.<turn|>", True),
        (Turn(None, {"f": ANY_OBJECT}), "<|tool_call>call:f{a:1<tool_call|>", False),
    ],
)  # fmt: skip
def test_turns(turn: Turn, text: str, allowed: bool) -> None:
    assert follows(turn, text) == (allowed, allowed)
