"""Writes the reference tables of docs/flags.md and docs/api.md from the code: every option, every route of the API.

``make docs-reference`` writes them; a test fails when a page and the code disagree.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

from microscale.cli import COMMANDS, load
from microscale.server.web.openapi import BODIES, SUMMARIES
from tools.docs.links import ROOT

HEADINGS = {
    "/v1/chat/completions": "Chat Completions",
    "/v1/completions": "Completions",
    "/v1/responses": "Responses",
    "/v1/messages": "Messages",
    "/v1/messages/count_tokens": "Count tokens of messages",
    "/tokenize": "Tokenize",
    "/detokenize": "Detokenize",
}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by what is typed after ``microscale``, including the commands of a group."""
    for name in COMMANDS:
        command = load(name)
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command
            continue
        for below, each in inner.items():
            # `bench MODEL` runs the command `model` of the group, whose name is never typed.
            yield (name if below == "model" else f"{name} {below}"), each


def flags() -> str:
    """A section per command: what it does, then its arguments and options."""
    parts = [f"- [`microscale {name}`](#{_anchor(name)}): {_summary(command)}\n" for name, command in commands()]
    for name, command in commands():
        parts.append(f"\n## microscale {name}\n\n{_described(command)}\n\n| | |\n| --- | --- |\n")
        parts += [f"| {_spelled(each)} | {_meaning(each)} |\n" for each in command.params if not _hidden(each)]
    return "".join(parts)


def _hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False)) or parameter.name == "help"


def _anchor(name: str) -> str:
    return f"microscale-{name.replace(' ', '-')}"


def _described(command: Any) -> str:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(command.help or ""))
    return _escaped("\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs), table=False)


def _summary(command: Any) -> str:
    """The first sentence of a command's help."""
    return re.split(r"(?<=\.)\s", _described(command), maxsplit=1)[0]


def _spelled(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.name.upper()}`"
    spellings = [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--")]
    return ", ".join(f"`{name}`" for name in spellings)


def _meaning(parameter: Any) -> str:
    text = _escaped(parameter.help or "")
    default = parameter.default
    default = default.value if isinstance(default, Enum) else default
    if default is None or default in ((), [], "", False) or callable(default):
        return text
    if default is True:
        return f"{text} On unless turned off."
    return f"{text} Default: `{default}`."


def _escaped(text: str, *, table: bool = True) -> str:
    """Plain text as Markdown; quoted code stays code."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*_<>\[\]])", r"\\\1", parts[i])
    joined = "`".join(parts)
    return " ".join(joined.replace("|", "\\|").split()) if table else joined


def routes() -> str:
    """A table of all routes, then the keys of each body."""
    rows = [f"| `{method.upper()} {path}` | {_escaped(says)} |\n" for (method, path), says in SUMMARIES.items()]
    parts = ["| route | what it does |\n| --- | --- |\n", *rows]
    for path, bodies in BODIES.items():
        if path not in HEADINGS:  # takes what another route takes
            continue
        parts.append(f"\n## {HEADINGS[path]}\n\n`POST {path}`: {_escaped(SUMMARIES['post', path])}\n")
        for body in bodies:
            schema = body.model_json_schema(ref_template="{model}")
            parts.append(f"\n**{body.__name__}**\n\n| key | type |\n| --- | --- |\n")
            required = schema.get("required", [])
            parts += [
                f"| `{name}` | {_type(field, schema.get('$defs', {}))}{', required' if name in required else ''} |\n"
                for name, field in schema["properties"].items()
            ]
    return "".join(parts)


BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}", "maxLength": "up to {} characters"}


def _type(field: dict[str, Any], known: dict[str, Any]) -> str:
    """A JSON schema in a few words."""
    if "$ref" in field:
        inner = known.get(str(field["$ref"]).rpartition("/")[2], {})
        return _type(inner, {}) if "enum" in inner or "const" in inner else "object"
    for key in ("anyOf", "oneOf"):
        if key in field:
            kinds = dict.fromkeys(_type(each, known) for each in field[key] if each.get("type") != "null")
            return " or ".join(kinds) or "null"
    if "const" in field or "enum" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), known)}"
    bounds = [text.format(field[key]) for key, text in BOUNDS.items() if field.get(key) is not None]
    return ", ".join([str(field.get("type", "anything")), *bounds])


# Page → the tables that stand in it between two comments.
PAGES: dict[str, tuple[str, Callable[[], str]]] = {
    "docs/flags.md": ("flags", flags),
    "docs/api.md": ("routes", routes),
}


def filled(page: str, text: str) -> str:
    """The page with its tables as the code has them now."""
    name, make = PAGES[page]
    begin, end = f"<!-- generated: {name} -->\n", f"<!-- end of generated: {name} -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no place for its tables: {begin.strip()} … {end}")
    return f"{before}{begin}\n{make()}\n{end}{after}"


def main() -> None:
    for page in PAGES:
        path = ROOT / page
        path.write_text(filled(page, path.read_text()))


if __name__ == "__main__":
    main()
