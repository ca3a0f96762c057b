"""The grammar of a whole turn of Gemma 4, for an answer of a certain form or a call that must come.

    start ── thoughts, free ──┬── answer: free, or of the wanted form ── <turn|>
                              └── calls of offered functions ─────────── <|tool_response>

Arguments are in Gemma's own spelling and not JSON, so that a schema cannot bind them: a call is well formed, of an
offered function, and its arguments are free.
"""

from __future__ import annotations

import json

from microscale.text.gemma import tokens as names
from microscale.text.gemma.parser import THOUGHT
from microscale.text.grammar import Turn, named

# Of a call's arguments. Texts end at a quote token, which no character is.
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
    """The grammar of what the model writes after a prompt that ends in its turn."""
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
