"""Converts pages from the repository's form to the site's: links, lists and headings.

Pages are written for readers on GitHub. Some are outside of ``docs/``, and some links point to files that are not
pages. GitHub's Markdown lets a list follow a paragraph directly; the site's needs an empty line in between.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
# Pages outside of docs/ → their names on the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "demo/README.md": "demo.md",
}
FENCE = re.compile(r"^(```|~~~)", re.MULTILINE)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
LIST = re.compile(r"(?:[-*] |\d+\. )\S")
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def place(source: str) -> str | None:
    """The path of a repository file on the site, or ``None`` if the site does not have it."""
    if source in OUTSIDE:
        return OUTSIDE[source]
    if source.startswith(DOCS) and (ROOT / source).is_file():
        return source.removeprefix(DOCS)
    return None


def prose(text: str) -> Iterator[tuple[bool, str]]:
    """A page in parts: ``True`` with text, ``False`` with a fenced block, including the lines of the fence."""
    inside, part = False, ""
    for line in text.splitlines(keepends=True):
        fence = FENCE.match(line) is not None
        if fence and not inside:
            yield True, part
            part, inside = line, True
        elif fence:
            yield False, part + line
            part, inside = "", False
        else:
            part += line
    yield not inside, part


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """The page with its text changed and its fenced blocks unchanged."""
    return "".join(change(part) if is_text else part for is_text, part in prose(text))


def resolve(source: str, target: str) -> tuple[str, str]:
    """The repository file that a link points to, and the anchor in it."""
    name, _, anchor = target.partition("#")
    if not name:
        return source, anchor
    return os.path.normpath(PurePosixPath(source).parent / name), anchor


def for_site(source: str, text: str) -> str:
    """A page of the repository with its links adjusted for the site."""
    here = place(source)
    assert here is not None, source

    def moved(link: re.Match[str]) -> str:
        target = link["target"]
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            return link[0]
        file, anchor = resolve(source, target)
        there = place(file)
        if there is None:  # a source file or a folder: keep the text only
            return link["text"]
        relative = os.path.relpath(there, PurePosixPath(here).parent)
        return f"{link['image']}[{link['text']}]({relative}{'#' + anchor if anchor else ''})"

    return in_prose(text, lambda part: lists(LINK.sub(moved, part)))


def lists(text: str) -> str:
    """Put an empty line before each list that follows a paragraph, and indent nested content by four spaces."""
    text = re.sub(r"^ {2,3}(?=\S)", "    ", text, flags=re.MULTILINE)
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        before = lines[-1] if lines else ""
        if LIST.match(line) and before.strip() and not LIST.match(before) and not before.startswith((" ", "|", "<")):
            lines.append("\n")
        lines.append(line)
    return "".join(lines)


def slug(heading: str) -> str:
    """The anchor that GitHub and the site give to a heading."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    found = (HEADING.findall(part) for is_text, part in prose(text) if is_text)
    return {slug(heading) for part in found for _, heading in part}


def section(text: str, heading: str) -> str:
    """A section of a page, without its heading."""
    start = re.search(rf"^## {re.escape(heading)}$\n", text, re.MULTILINE)
    if start is None:
        raise ValueError(f"no section {heading!r}")
    end = re.search(r"^## ", text[start.end() :], re.MULTILINE)
    return text[start.end() :][: end.start() if end else None].strip() + "\n"
