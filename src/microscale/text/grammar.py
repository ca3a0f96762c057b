"""Forms that a text must have, as grammars. Those of a whole turn are each chat format's own.

A grammar is data for ``llguidance``: JSON that holds one for the turn and one for each form. Nothing here imports it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    one_call: bool = False
    """No second call, where the format could hold one."""
    begun: Sequence[int] = ()
    """What the prompt holds of the turn already (``Rendered.begun``): the grammar begins after it."""


def alone(form: Form, ends: Sequence[str]) -> str:
    """The grammar of a text that is nothing but ``form``, ended by one of the control tokens ``ends``."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: @form ({' | '.join(ends)})"}, named("form", form)]})


def named(name: str, form: Form) -> dict[str, Any]:
    """A form under the name by which a grammar's rules call it."""
    return {"name": name, **form.grammar()}
