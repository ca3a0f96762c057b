"""The commands that the pages show, and what the command line makes of each without running it.

A block of shell commands is run by ``make docs-commands``, unless a comment above its fence says what it needs and this
machine may not have: ``<!-- needs: gpu, network -->``. Readers see no comment. Commands of such a block are read all
the same: the subcommand, its options and their values must be what the command line takes.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from microscale.cli import COMMANDS, load

ROOT = Path(__file__).parents[2]
NEEDS = {
    "gpu": "an NVIDIA GPU",
    "network": "a download, or another machine",
    "docker": "a builder of images",
    "root": "rights that no test should have",
    "time": "more than a minute of two cores",
    "files": "files that only the reader has",
}
SHELL = ("console", "sh")
OUTSIDE = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
OUTSIDE |= {"demo.md": "demo/README.md", "changelog.md": "CHANGELOG.md"}
# Written elsewhere, and read without a mark.
UNMARKED = frozenset({"README.md"})
FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[^\n]*?) -->\n)?^```(?P<language>[^\n]*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE
)
MICROSCALE = re.compile(r"(?:\S*/)?microscale$")
GUESSED = re.compile(r"(?:\S*/)?(?:microscale|make) ")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
PLACEHOLDER = {"MODEL": "gpt-oss-20b", "FILE": "file.svg"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    needs: frozenset[str]
    body: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        return self.language in SHELL

    @property
    def commands(self) -> list[str]:
        """One command each: lines that go on are joined, comments and what was printed are left out."""
        lines = self.body.replace("\\\n", " ").splitlines()
        if not self.language:  # it may hold anything
            lines = [line for line in lines if GUESSED.match(line)]
        lines = joined(lines, "$ " if self.language == "console" else "")
        found = (re.sub(r"\s+# .*", "", line).strip() for line in lines)
        return [re.sub(r"\s+", " ", line) for line in found if line and not line.startswith("#")]


def joined(lines: list[str], prompt: str) -> list[str]:
    """What follows the prompt, to the line that closes its quotes."""
    found: list[str] = []
    is_open = False
    for line in lines:
        if is_open:
            found[-1] += " " + line.strip()
        elif line.startswith(prompt):
            found.append(line.removeprefix(prompt))
        else:
            continue
        try:
            shlex.split(found[-1], comments=True)
            is_open = False
        except ValueError:
            is_open = True
    return found


def blocks(page: str, text: str | None = None) -> list[Block]:
    text = (ROOT / page).read_text() if text is None else text
    return [
        Block(
            page,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            frozenset(part.strip() for part in (found["needs"] or "").split(",") if part.strip()),
            found["body"],
        )
        for found in FENCE.finditer(text)
    ]


def nav() -> list[str]:
    """The pages of the site, by their paths in the repository, in the order of its menu, which mkdocs.yml ends with."""
    found: list[str] = []

    def walk(entry: Any) -> None:
        if isinstance(entry, str):
            found.append(entry)
        for each in entry if isinstance(entry, list) else entry.values() if isinstance(entry, dict) else ():
            walk(each)

    text = (ROOT / "mkdocs.yml").read_text()
    walk(yaml.safe_load(text[text.index("\nnav:") :])["nav"])
    return [OUTSIDE.get(name, f"docs/{name}") for name in found if name != "glossary.md"]


def pages() -> list[str]:
    """Every page of the repository, in the menu or not, except the lab books, whose commands are of their time."""
    outside = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "demo/README.md"]
    found = (path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "lab")
    return outside + sorted(str(path.relative_to(ROOT)) for path in found)


def words(command: str) -> list[str]:
    """A command's words without variables before it, ``sudo``, and what others read from it."""
    found = shlex.split(command)
    while found and (ASSIGNMENT.match(found[0]) or found[0] == "sudo"):
        found = found[1:]
    for stop in ("|", ">", "&&", ";"):
        found = found[: found.index(stop)] if stop in found else found
    return found


def complaint(command: str) -> str | None:
    """What the command line would say against a command that it is given; nothing if it would run it."""
    parts = words(command)
    if not parts:
        return None
    if parts[0] == "make":
        return _make(parts[1:])
    if parts[0] == "docker" and "microscale" in parts and parts[1] == "run":
        parts = parts[parts.index("microscale") :]
    if not MICROSCALE.match(parts[0]) or len(parts) < 2:
        return None
    return _microscale(parts[1], [PLACEHOLDER.get(word, word) for word in parts[2:]])


def _make(targets: list[str]) -> str | None:
    known = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    wrong = [word for word in targets if "=" not in word and word not in known]
    return f"no such target: {', '.join(wrong)}" if wrong else None


def _microscale(name: str, arguments: list[str]) -> str | None:
    if name not in COMMANDS:
        return f"no such command: {name}"
    command = load(name)
    try:
        context = command.make_context(name, list(arguments))
        if hasattr(command, "commands"):  # a group: its command reads the rest
            rest = [*getattr(context, "_protected_args", []), *context.args]
            below, inner, rest = command.resolve_command(context, rest)
            inner.make_context(below, rest, parent=context)
    except Exception as error:  # whatever the library calls wrong usage: its base class changes with its version
        shown = getattr(error, "format_message", None)
        return str(shown() if shown else error) or type(error).__name__
    return None
