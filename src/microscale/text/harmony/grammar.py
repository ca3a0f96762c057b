"""The grammar of a whole turn of Harmony, for a final answer or a call's arguments that must have a certain form.

    start ── analysis messages, free ──┬── final answer: free, or of the wanted form ── <|return|>
                                       └── call of an offered function: its form ────── <|call|>

Control tokens are terminals of the grammar, so the headers are right too: no malformed one leads past the form. A turn
ends with its first call, so that there is never a second.
"""

from __future__ import annotations

import json

from microscale.text.grammar import Turn, named
from microscale.text.harmony import tokens as names
from microscale.text.harmony.header import NAMESPACE


def of_turn(turn: Turn) -> str:
    """The grammar of what the model writes after ``<|start|>assistant``."""
    calls = list((turn.calls or {}).items())
    ways = [] if turn.must_call else ["final"]
    ways += [f"call_{number}" for number in range(len(calls))]
    again = f'{names.END} {names.START} "assistant"'
    typed = f'(" "? {names.CONSTRAIN} "json" | " json")?'
    # A preamble is content: beside an answer of a certain form it would spoil that.
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
