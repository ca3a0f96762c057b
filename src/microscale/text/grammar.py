"""Formats of text ("forms") as grammars. Each chat format makes the grammar of a whole turn itself.

A grammar is data for ``llguidance``: JSON with one grammar for the turn and one for each form. Nothing here imports
that library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WHITESPACE = r"( |\n[ \t]{0,64})"
"""Between the parts of JSON: one space, or a line break and indentation. Without a limit, models fill pages with it."""


@dataclass(frozen=True)
class Schema:
    """JSON that follows a schema. Parts that cannot be enforced are an error if ``strict``, else ignored."""

    schema: Mapping[str, Any]
    strict: bool = True

    def grammar(self) -> dict[str, Any]:
        options = {"whitespace_pattern": WHITESPACE, "lenient": not self.strict, "coerce_one_of": not self.strict}
        # Last, so that a schema cannot set its own options.
        return {"json_schema": {**self.schema, "x-guidance": options}}


@dataclass(frozen=True)
class Lark:
    """Text that follows a grammar in llguidance's dialect of Lark."""

    text: str

    def grammar(self) -> dict[str, Any]:
        return {"lark_grammar": self.text}


Form = Schema | Lark
ANY_OBJECT = Schema({"type": "object"})


def regex(pattern: str) -> Lark:
    """Text that a regular expression matches completely."""
    return Lark(f"start: /{escaped(pattern)}/")


def escaped(pattern: str) -> str:
    """A regular expression between slashes in Lark: one in it would end it. Escaped characters stay."""
    return re.sub(
        r"\\.|[/\n]", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), pattern, flags=re.DOTALL
    )


def choice(texts: Sequence[str]) -> Lark:
    """One of several texts."""
    return Lark("start: " + " | ".join(json.dumps(text) for text in texts))


@dataclass(frozen=True)
class Turn:
    """What one turn may contain."""

    answer: Form | None = None
    """The form of the final answer; ``None`` means free text."""
    calls: Mapping[str, Schema] | None = None
    """Functions that may be called, with the form of their arguments."""
    must_call: bool = False
    one_call: bool = False
    """At most one call."""
    begun: Sequence[int] = ()
    """The part of the turn that is already in the prompt (``Rendered.begun``): the grammar begins after it."""


def alone(form: Form, ends: Sequence[str]) -> str:
    """The grammar of a text that consists only of ``form``, followed by one of the control tokens ``ends``."""
    return json.dumps({"grammars": [{"lark_grammar": f"start: @form ({' | '.join(ends)})"}, named("form", form)]})


def named(name: str, form: Form) -> dict[str, Any]:
    """A form under the name that a grammar's rules use."""
    return {"name": name, **form.grammar()}
