"""The grammar of a whole turn of ChatML, for an answer or a call's arguments that must have a certain form.

    start ── thoughts, free ──┬── answer: free, or of the wanted form ───────── <|im_end|>
                              └── text, if the answer is free ── calls: theirs ─┘

Control tokens are terminals, so no text leads past the form. Where the prompt has begun the thoughts, the grammar
begins in them, or after them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any

from microscale.text.chatml import tokens as names
from microscale.text.grammar import Form, Turn, named


class Thoughts(Enum):
    """What the prompt has of the turn's thoughts."""

    NONE = 0
    OPEN = 1
    CLOSED = 2


_BEFORE = {
    Thoughts.NONE: f"({names.THINK} TEXT {names.END_THINK} gap?)?",
    Thoughts.OPEN: f"TEXT {names.END_THINK} gap?",
    Thoughts.CLOSED: "",
}


def of_turn(turn: Turn, thoughts: Thoughts = Thoughts.NONE) -> str:
    """The grammar of what the model writes after a prompt that ends in its turn."""
    answer = "ANSWER" if turn.answer is None else "@answer"
    ways = [] if turn.must_call else [answer]
    rules = [r"TEXT: /(.|\n)*/", r"ANSWER: /(.|\n)+/", r'gap: "\n\n" | "\n"']
    forms = [] if turn.answer is None else [named("answer", turn.answer)]
    if turn.calls:
        # Beside an answer of a certain form other text would spoil it; where a call must come, it might never.
        before = "ANSWER? " if turn.answer is None and not turn.must_call else ""
        ways.append(before + ("call" if turn.one_call else r'call ("\n" call)*'))
        rules += _calls(turn.calls)
        forms += [named(f"arguments_{number}", form) for number, form in enumerate(turn.calls.values())]
    start = f"start: {_BEFORE[thoughts]} ({' | '.join(ways)}) {names.END}"
    grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join([start, *rules])}, *forms]
    return json.dumps({"grammars": grammars})


def _calls(calls: Mapping[str, Form]) -> list[str]:
    """One rule for each function that may be called."""
    rules = ["call: " + " | ".join(f"call_{number}" for number in range(len(calls)))]
    for number, function in enumerate(calls):
        head = json.dumps(f'\n{{"name": {json.dumps(function)}, "arguments": ')
        rules.append(f'call_{number}: {names.CALL} {head} @arguments_{number} "}}\\n" {names.END_CALL}')
    return rules
