"""The pages in the repository: links have targets, and every command that a page names exists."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from microscale.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "demo/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# The lab books are history: their commands are those of their time.
CURRENT = [page for page in PAGES if page.parent.name != "lab"]
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
# Code in a page: fenced blocks, and what stands between backticks (it may go on in the next line).
CODE = re.compile(r"^```.*?^```|`[^`]+`", re.DOTALL | re.MULTILINE)
# A command begins a line, or follows a backtick, a prompt or a path.
MAKE = re.compile(r"(?:^|[`$]\s*)make ([a-z][a-z-]*)", re.MULTILINE)
MICROSCALE = re.compile(r"(?:^|[`$/]\s*|\.venv/bin/)microscale ([a-z]\w*)", re.MULTILINE)


def links(text: str) -> list[str]:
    """Targets within the project, without those in code."""
    found = LINK.findall(FENCE.sub("", text))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to a page's headings; no heading here stands twice."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named(pattern: re.Pattern[str], text: str) -> set[str]:
    return {name for code in CODE.findall(text) for name in pattern.findall(code)}


@cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def broken_links(page: Path, text: str) -> list[str]:
    wrong = []
    for link in links(text):
        name, _, anchor = link.partition("#")
        target = page.parent / name
        if name and not target.exists():
            wrong.append(link)
            continue
        there = target.read_text() if anchor and name else text
        if anchor and anchor not in anchors(there):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken_links(page, page.read_text())


@pytest.mark.parametrize("page", CURRENT, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    text = page.read_text()
    assert named(MAKE, text) <= targets()
    assert named(MICROSCALE, text) <= set(COMMANDS)


def test_every_lab_book_is_in_the_index() -> None:
    index = ROOT / "docs/lab/README.md"
    assert {path.name for path in index.parent.glob("*.md")} - {index.name} <= set(links(index.read_text()))


def test_commands_and_links_are_found_at_all() -> None:
    assert named(MAKE, (ROOT / "README.md").read_text()) >= {"install", "serve", "test", "prove"}
    first = (ROOT / "README.md").read_text() + (ROOT / "docs/using.md").read_text()
    assert named(MICROSCALE, first) >= {"serve", "chat", "explain", "prove"}
    assert sum(len(links(page.read_text())) for page in PAGES) > 50


def test_what_is_wrong_is_found() -> None:
    page = ROOT / "docs/page.md"
    text = """[a](kernels.md) [b](kernels.md#no-such-heading) [c](absent.md) [d](https://example.org)
[e](#here) [f](#there)

# Here
```
make nothing
[g](in_code.md)
```
Please make sure. `microscale dance --fast`, `make no-target`, `.venv/bin/microscale serve`
"""
    assert broken_links(page, text) == ["kernels.md#no-such-heading", "absent.md", "#there"]
    assert anchors(text) == {"here"}
    assert named(MAKE, text) == {"nothing", "no-target"}
    assert named(MICROSCALE, text) == {"dance", "serve"}
