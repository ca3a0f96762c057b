"""The grammar of a whole turn of Harmony, for a final answer or a call's arguments that must have a certain form.

    start ── analysis messages, free ──┬── final answer: free, or of the wanted form ── <|return|>
                                       └── call of an offered function: its form ────── <|call|>

Control tokens are terminals of the grammar, so the headers are right too: no malformed one leads past the form. A
grammar is data for ``llguidance``, JSON that holds one for the turn and one for each form; nothing here imports it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microscale.text import harmony_tokens as names
from microscale.text.harmony_header import NAMESPACE

WHITESPACE = r"( |\n[ \t]{0,64})"
"""Between the parts of JSON: one space, or a line's end and its indentation. Unbounded, it fills pages."""


@dataclass(frozen=True)
class Schema:
    """JSON of a certain schema. What it says that cannot be kept is an error if it is ``strict``, else ignored."""

    schema: Mapping[str, Any]
    strict: bool = True

    def grammar(self) -> dict[str, Any]:
        options = {"whitespace_pattern": WHITESPACE, "lenient": not self.strict, "coerce_one_of": not self.strict}
        # Last, so that a schema cannot bring options of its own.
        return {"json_schema": {**self.schema, "x-guidance": options}}


@dataclass(frozen=True)
class Lark:
    """Text of a grammar in llguidance's dialect of Lark."""

    text: str

    def grammar(self) -> dict[str, Any]:
        return {"lark_grammar": self.text}


Form = Schema | Lark
ANY_OBJECT = Schema({"type": "object"})


def regex(pattern: str) -> Lark:
    """Text that a regular expression matches as a whole."""
    # In Lark a slash ends the expression; what is escaped already stays.
    spelt = re.sub(
        r"\\.|[/\n]", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), pattern, flags=re.DOTALL
    )
    return Lark(f"start: /{spelt}/")


def choice(texts: Sequence[str]) -> Lark:
    """One of some texts."""
    return Lark("start: " + " | ".join(json.dumps(text) for text in texts))


@dataclass(frozen=True)
class Turn:
    """What may come of one turn."""

    answer: Form | None = None
    """The form of the final answer; ``None`` leaves it free."""
    calls: Mapping[str, Form] | None = None
    """Functions that may be called, with the form of their arguments."""
    must_call: bool = False


def alone(form: Form, ends: Sequence[str]) -> str:
    """The grammar of a text that is nothing but ``form``, ended by one of the control tokens ``ends``."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: @form ({' | '.join(ends)})"}, _named("form", form)]})


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
    forms = [] if turn.answer is None else [_named("answer", turn.answer)]
    for number, (function, form) in enumerate(calls):
        to = json.dumps(f"commentary to={NAMESPACE}{function}")
        body = f"{names.MESSAGE} @arguments_{number} {names.CALL}"
        rules.append(f"call_{number}: {names.CHANNEL} {to} {typed} {body}")
        forms.append(_named(f"arguments_{number}", form))
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *forms]})


def _named(name: str, form: Form) -> dict[str, Any]:
    return {"name": name, **form.grammar()}
