"""The grammar of a call as XML tags: parameters in the schema's order, each value as its schema allows.

A text is free up to its closing tag, unless the schema lists the values or limits length, pattern or format; with a
pattern or format it has one line. All other values are JSON. What cannot be enforced is passed over, and is the reason
why a schema cannot be strict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from microscale.text.chatml.call import CallGrammar
from microscale.text.chatml.xml_schema import ANYTHING, TEXT, alternatives, as_list, as_mapping, listed, resolved
from microscale.text.grammar import Schema, escaped, named

CLOSE = "\n</parameter>"
"""The end of a value."""
END = "</function>"

MAX_CHARS = 1 << 20
"""Of one function's grammar."""
MAX_LENGTH = 10_000
"""The largest limit of a text's length: an automaton has as many states."""

_CLOSE = r"\n<\/parameter>"
_UNENFORCED = (
    "allOf", "anyOf", "const", "dependentRequired", "dependentSchemas", "enum", "if", "maxProperties", "minProperties",
    "not", "oneOf", "patternProperties", "propertyNames",
)  # fmt: skip
"""Keywords of the parameters as a whole."""
_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
}


def call_grammar(number: int, function: str, form: Schema) -> CallGrammar:
    return _Parameters(number, form).grammar(function)


def why_not_strict(form: Schema) -> str | None:
    parameters = _Parameters(0, form)
    parameters.grammar("")
    return parameters.fault


class _Parameters:
    """Collects the rules and forms of one function's parameters."""

    def __init__(self, number: int, form: Schema) -> None:
        self._number = number
        self._form = form
        self._root = form.schema
        self._rules: list[str] = []
        self._forms: list[dict[str, Any]] = []
        self._room = MAX_CHARS
        self.fault: str | None = None
        """The last thing that cannot be enforced."""

    def grammar(self, function: str) -> CallGrammar:
        schema = resolved(self._root, self._root)
        for keyword in _UNENFORCED:
            if keyword in schema:
                self.fault = f"this model writes parameters as XML, where {keyword!r} of all of them cannot be enforced"
        required = [name for name in as_list(schema.get("required")) if isinstance(name, str)]
        properties = dict(as_mapping(schema.get("properties")))
        properties |= {name: ANYTHING for name in required if name not in properties}
        parts: list[str] = []
        for name, value in properties.items():
            if "\n" in name or ">" in name:
                self.fault = f"the parameter name {name!r} cannot be written in an XML tag"
            elif value is not False:
                rule = self._rule("parameter", f"{_open(name)} ({self._value(value)})")
                parts.append(rule if name in required else f"{rule}?")
        others = schema.get("additionalProperties", True)
        if others is not False:
            # Not a second value of a parameter that has its own rule.
            known = " | ".join(map(_open, properties))
            tag = r"/<parameter=[^>\n]{1,128}>/" + (f" & ~({known})" if known else "")
            name = self._rule("OTHER", tag)
            parts.append(self._rule("other", f"{name} ({self._value(others)})") + "*")
        body = " ".join([json.dumps(f"<function={function}>\n"), *parts, json.dumps(END)])
        return CallGrammar(body, [*FREE_RULES, *self._rules], self._forms)

    def _rule(self, kind: str, text: str, attributes: str = "") -> str:
        name = f"{kind}_{self._number}_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {text}")
        return name

    def _value(self, schema: Any) -> str:
        """What comes after a parameter's tag: a line break, the value, and the closing tag."""
        ways: list[str] = []
        if self._room < 0:
            self.fault = f"the schema is too large: its grammar has more than {MAX_CHARS} characters"
            return FREE
        for member in alternatives(schema, self._root):
            values = listed(member)
            if values is not None:
                texts = [value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for value in values]
                ways += [json.dumps(f"\n{text}{CLOSE}\n") for text in texts]
            elif member.get("type") == TEXT:
                ways.append(self._text(member))
            elif "type" in member or "properties" in member:
                ways.append(rf'"\n" {self._json(member)} {json.dumps(CLOSE)} "\n"')
            else:
                ways.append(FREE)
        self._room -= sum(map(len, ways))
        return FREE if FREE in ways else " | ".join(ways)

    def _text(self, schema: Mapping[str, Any]) -> str:
        least, most = self._length(schema, "minLength"), self._length(schema, "maxLength")
        patterns = [_anchored(pattern)] if isinstance(pattern := schema.get("pattern"), str) else []
        named_format = schema.get("format")
        if isinstance(named_format, str) and named_format in _FORMATS:
            patterns.append(_FORMATS[named_format])
        elif named_format is not None:
            self.fault = f"the format {named_format!r} of a text cannot be enforced outside of JSON"
        # A text without a line break cannot contain a closing tag, which would end it early.
        if patterns:
            patterns.append(f"[^\\n]{{{least or 0},{'' if most is None else most}}}")
            return self._rule("TEXT", " & ".join(rf"/\n({pattern}){_CLOSE}/" for pattern in patterns)) + r' "\n"'
        if least is None and most is None:
            return FREE
        least = least or 0
        rest = "" if most is None else max(most - least, 0)
        text = rf"/\n[^\n]{{{least}}}(.|\n){{0,{rest}}}/"
        return self._rule("text", text, f"[suffix={json.dumps(CLOSE)}]") + r' "\n"'

    def _length(self, schema: Mapping[str, Any], keyword: str) -> int | None:
        length = schema.get(keyword)
        if isinstance(length, int) and 0 <= length <= MAX_LENGTH:
            return length
        if length is not None:
            self.fault = f"{keyword!r} {length!r} of a text cannot be enforced outside of JSON"
        return None

    def _json(self, schema: Mapping[str, Any]) -> str:
        if '"$ref"' in json.dumps(schema):
            schema = {**_moved(schema), "$defs": {"whole": _moved(self._root)}}
        name = f"value_{self._number}_{len(self._forms)}"
        self._forms.append(named(name, Schema(schema, self._form.strict)))
        self._room -= len(json.dumps(schema))
        return f"@{name}"


FREE = "free"
"""The rule of any text with its closing tag."""
# A closing tag on the next line ends the value, also if that leaves it empty.
FREE_RULES = [rf'{FREE}: free_text "\n"', rf"free_text[suffix={json.dumps(CLOSE)}]: /(\n(.|\n)*)?/"]


def _moved(schema: Any) -> Any:
    """A part of a schema whose ``$ref``s to the whole schema now point into ``$defs/whole``."""
    if isinstance(schema, list):
        return [_moved(value) for value in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: f"#/$defs/whole{value[1:]}" if key == "$ref" and isinstance(value, str) else _moved(value)
        for key, value in schema.items()
    }


def _open(name: str) -> str:
    return json.dumps(f"<parameter={name}>")


def _anchored(pattern: str) -> str:
    """A pattern of a JSON schema, which may match anywhere, as one that matches the whole text."""
    anything = r"[^\n]*"
    inner = pattern.removeprefix("^")
    begin = "" if inner != pattern else anything
    is_closed = inner.endswith("$") and not inner.endswith(r"\$")
    return f"{begin}({escaped(inner[:-1] if is_closed else inner)}){'' if is_closed else anything}"
