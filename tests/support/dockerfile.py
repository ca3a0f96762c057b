"""A Dockerfile as data: its stages and their instructions, as far as ours uses the language."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True)
class Instruction:
    name: str
    text: str
    """All after the name, its lines joined."""

    def words(self) -> list[str]:
        """A list in JSON, or words as a shell reads them."""
        return list(json.loads(self.text)) if self.text.startswith("[") else shlex.split(self.text)


@dataclass
class Stage:
    name: str
    parent: str
    """An image, or the name of an earlier stage."""
    instructions: list[Instruction] = field(default_factory=list)

    def last(self, name: str) -> Instruction:
        return [instruction for instruction in self.instructions if instruction.name == name][-1]


def instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Instruction(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def read(path: Path) -> tuple[dict[str, str], list[Stage]]:
    """The arguments before the first stage, and the stages."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for instruction in instructions(path.read_text()):
        if instruction.name == "FROM":
            parent, _, name = instruction.text.partition(" AS ")
            stages.append(Stage(name, expand(parent, arguments)))
        elif stages:
            stages[-1].instructions.append(instruction)
        else:
            name, _, value = instruction.text.partition("=")
            arguments[name] = value.strip('"')
    return arguments, stages


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``${NAME}``; a variable that nobody has set stays, and the shell makes of it what it does."""
    return VARIABLE.sub(lambda found: variables.get(found[1], found[0]), text)
