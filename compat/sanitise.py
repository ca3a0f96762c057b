"""Makes recorded requests fit to be kept: keys, types and nesting stay, texts become ours, ids become plain.

    python -m compat.sanitise OUT.json CLIENT VERSION CAPTURE.json …

Captures are those of ``recorder.py``, the requests of one conversation in their order. What comes out is sent by
``tests/server/test_recorded.py``. An id that the server made itself in an earlier reply becomes
``{{0.output.1.call_id}}``: where it stands in the reply to the first request.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT = "A text of the client's, in our words."
QUESTION = "List the files of this folder"
PATCH = "Add a file by a patch"
GRAMMAR = 'start: "*** Begin Patch" LF /(.|\\n)+/ "*** End Patch" LF?\nLF: /\\n/\n'
# Strings that say what a thing is. All others are somebody's text.
KINDS = {
    "type",
    "role",
    "name",
    "effort",
    "summary",
    "verbosity",
    "tool_choice",
    "syntax",
    "execution",
    "keep",
    "status",
}
KINDS |= {"$schema", "format", "id", "call_id", "tool_use_id", "arguments", "input", "pattern"}
KINDS |= {"include", "required", "enum", "search_content_types", "const", "previous_response_id"}
HEADERS = {"anthropic-beta", "anthropic-version", "x-app", "originator", "accept", "x-codex-beta-features"}
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class Sanitiser:
    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._made: dict[str, str] = {}

    def request(self, record: dict[str, Any], number: int) -> dict[str, Any]:
        body = self._clean(record["body"], "")
        body["model"] = "scripted"
        headers = {k.lower(): self._plain(v) for k, v in record["headers"].items() if k.lower() in HEADERS}
        self._made |= {made: where for where, made in ids_in(record["reply"], str(number))}
        return {"path": record["path"], "headers": headers, "body": body}

    def _clean(self, value: Any, key: str) -> Any:
        if isinstance(value, dict):
            return {name: self._clean(inner, name) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._clean(inner, key) for inner in value]
        return self._string(value, key) if isinstance(value, str) else value

    def _string(self, text: str, key: str) -> str:
        if text in self._made:
            return "{{" + self._made[text] + "}}"
        if key == "definition":
            return GRAMMAR
        if key in KINDS:
            return self._plain(text)
        if text.startswith("{"):
            return '{"a": "b"}'
        if key in ("text", "content") and len(text) < 60:
            return QUESTION if "atch" not in text and "Add" not in text else PATCH
        return self._plain(text) if UUID.fullmatch(text) else TEXT

    def _plain(self, text: str) -> str:
        return UUID.sub(
            lambda found: self._ids.setdefault(found[0], f"{len(self._ids):08d}-0000-7000-8000-{0:012d}"), text
        )


def ids_in(reply: Any, at: str) -> Iterator[tuple[str, str]]:
    """Every id in a reply and where it stands; of a stream, in the response that its last event holds."""
    if isinstance(reply, str):
        events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")]
        yield from ids_in(events[-1].get("response") if events else None, at)
    elif isinstance(reply, dict):
        for key, value in reply.items():
            if key in ("id", "call_id") and isinstance(value, str):
                yield f"{at}.{key}", value
            else:
                yield from ids_in(value, f"{at}.{key}")
    elif isinstance(reply, list):
        for index, value in enumerate(reply):
            yield from ids_in(value, f"{at}.{index}")


def main() -> None:
    out, client, version, *captures = sys.argv[1:]
    sanitiser = Sanitiser()
    records = [json.loads(Path(capture).read_text()) for capture in captures]
    requests = [sanitiser.request(record, number) for number, record in enumerate(records)]
    kept = {"client": client, "version": version, "requests": requests}
    Path(out).write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
