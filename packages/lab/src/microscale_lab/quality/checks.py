"""An answer as its parts, and whether it is right.

A check is one of

    {"kind": "number", "value": 632}                          the last number of the final answer
    {"kind": "contains", "value": "Paris"}                    words of the final answer
    {"kind": "call", "name": "f", "arguments": {"x": 1}}      one call, exactly this
    {"kind": "json", "schema": {…}, "value": {…}}             the final answer is JSON that fits; ``value`` is right
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from microscale.errors import Unsupported
from microscale.text.chat_format import ChatFormat
from microscale.text.conversation import Tool
from microscale.text.output import ChatOutput

KNOWN = {"type", "properties", "required", "additionalProperties", "items", "enum", "description", "title"}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}


def fits(value: object, schema: Mapping[str, Any]) -> bool:
    """Whether ``value`` is valid against ``schema``."""
    if not schema.keys() <= KNOWN:
        raise Unsupported(f"The tasks' schemas have no {', '.join(sorted(schema.keys() - KNOWN))}.")
    kind = schema["type"]
    # JSON's true is no number, Python's is.
    if not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, list):
        return all(fits(item, schema["items"]) for item in value)
    if isinstance(value, dict):
        properties = schema["properties"]
        if not set(schema.get("required", ())) <= value.keys():
            return False
        if schema.get("additionalProperties", True) is False and not value.keys() <= properties.keys():
            return False
        return all(fits(item, properties[key]) for key, item in value.items() if key in properties)
    return True


NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class ModelAnswer:
    """One turn of the model."""

    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]
    """Function and arguments, as they were written."""
    flaws: tuple[str, ...]
    """What was wrong with its form."""


def parse(token_ids: Sequence[int], chat_format: ChatFormat, tools: Collection[Tool]) -> ModelAnswer:
    """What the ids of a completion, an end token included, say."""
    output = ChatOutput(chat_format.parser(tools))
    deltas = [delta for delta in (output.feed(token_ids), output.finish()) if delta is not None]
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for call in (call for delta in deltas for call in delta.calls):
        if call.function is not None:
            names[call.call_idx] = call.function
        arguments[call.call_idx] = arguments.get(call.call_idx, "") + call.arguments
    return ModelAnswer(
        "".join(delta.reasoning for delta in deltas),
        "".join(delta.content for delta in deltas),
        tuple((names[at], arguments[at]) for at in names),
        tuple(str(flaw) for flaw in output.flaws),
    )


def is_right(answer: ModelAnswer, check: Mapping[str, Any]) -> bool:
    """Whether the answer passes its check."""
    kind = check["kind"]
    if kind == "number":
        found = NUMBER.findall(answer.content)
        return bool(found) and float(found[-1]) == check["value"]
    if kind == "contains":
        return _contains(answer.content, str(check["value"]))
    if kind == "call":
        made = [[name, _loaded(text)] for name, text in answer.calls]
        return _same(made, [[check["name"], check["arguments"]]])
    if kind == "json":
        value = _loaded(answer.content)
        return value is not None and fits(value, check["schema"])
    raise Unsupported(f"Unknown kind of check {kind!r}.")


def is_exact(answer: ModelAnswer, check: Mapping[str, Any]) -> bool:
    """As ``is_right``; of a JSON answer every value as well."""
    return is_right(answer, check) and (check["kind"] != "json" or _same(_loaded(answer.content), check["value"]))


def _contains(text: str, words: str) -> bool:
    """``words`` in ``text``, not as a part of longer words."""
    before = r"(?<!\w)" if words[:1].isalnum() else ""
    after = r"(?!\w)" if words[-1:].isalnum() else ""
    return re.search(before + re.escape(words) + after, text) is not None


def _same(a: object, b: object) -> bool:
    """Whether two JSON values are the same; true is not 1, as it is in Python."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
