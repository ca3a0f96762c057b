"""The commands of README and docs/using.md, and how each is run on a GPU. A test holds the table against the pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
USING = ROOT / "docs/using.md"
REAL = "gpt-oss-20b --load-format dummy"


def commands(page: str | None = None) -> list[str]:
    """What is typed: every line of README's blocks and, on other pages, what follows each ``$``. Lines that go on are
    joined, comments left out."""
    if page is None:
        return list(dict.fromkeys([*_typed(README.read_text(), "sh", ""), *commands(USING.read_text())]))
    return _typed(page, "console", "$ ")


def _typed(page: str, language: str, prompt: str) -> list[str]:
    found: list[str] = []
    for block in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if found and found[-1].count("'") % 2:  # its quotes are open
                found[-1] += line
            elif line.startswith(prompt):
                found.append(re.sub(r"\s+# .*", "", line.removeprefix(prompt)))
    return [re.sub(r"\s+", " ", command).strip() for command in found]


class Kind(Enum):
    """How a command is run."""

    PLAIN = "as it is, to its end"
    SERVER = "started, asked, and stopped by SIGTERM"
    CLIENT = "asked of the server that was started"
    TERMINAL = "in a terminal, one question, and left"
    ELSEWHERE = "not here"


@dataclass(frozen=True)
class How:
    kind: Kind
    arguments: str = ""
    """After ``microscale``; what needs a download has a model in its place that needs none."""
    shows: str = ""
    """A pattern in what it prints."""
    because: str = ""
    """Why it does not run on a GPU's machine."""


INSTALLED = "the tests run in an installation"
TABLE = {
    "git clone ADDRESS microscale && cd microscale": How(Kind.ELSEWHERE, because=INSTALLED),
    "make install": How(Kind.ELSEWHERE, because=INSTALLED),
    ".venv/bin/microscale serve openai/gpt-oss-20b": How(
        Kind.ELSEWHERE, because="a download of 14 GB; the same with --max-model-len has a model in its place"
    ),
    "make serve": How(Kind.SERVER, "serve", "Serving"),
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
    '-d \'{"messages": [{"role": "user", "content": "What is 247 + 385?"}], "stream": true}\'': How(
        Kind.CLIENT, shows=r"data: \[DONE\]"
    ),
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
    '-d \'{"messages": [{"role": "user", "content": "What is the weather in Paris?"}], '
    '"tools": [{"type": "function", "function": {"name": "get_weather", '
    '"parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]}\'': How(
        Kind.CLIENT, shows='"name": ?"get_weather"'
    ),
    ".venv/bin/microscale explain gpt-oss-20b --gpu 5090": How(
        Kind.PLAIN, "explain gpt-oss-20b --gpu 5090", r"(?m)^speed +[\d.]+ \([\d.]+-[\d.]+\) tokens per"
    ),
    ".venv/bin/microscale chat": How(Kind.TERMINAL, "chat", "632"),
    '.venv/bin/microscale run "What is 247 + 385?"': How(Kind.PLAIN, 'run demo "What is 247 + 385?"', r"\d"),
    ".venv/bin/microscale serve openai/gpt-oss-20b --max-model-len 32768": How(
        Kind.SERVER, "serve demo --max-model-len 1024", "Serving"
    ),
    ".venv/bin/microscale chat /models/gpt-oss-20b": How(Kind.TERMINAL, "chat demo", "632"),
    ".venv/bin/microscale generate /models/gpt-oss-20b --prompt-ids 1,2,3 --temperature 0.8 --seed 7": How(
        Kind.PLAIN, f"generate {REAL} --prompt-ids 1,2,3 --temperature 0.8 --seed 7", r"(?m)^\d+(,\d+){15}$"
    ),
    ".venv/bin/microscale explain gpt-oss-120b --gpu gb10 --precision balanced": How(
        Kind.PLAIN,
        "explain gpt-oss-120b --gpu gb10 --precision balanced",
        r"(?m)^speed +[\d.]+ \([\d.]+-[\d.]+\) tokens per",
    ),
    ".venv/bin/microscale explain gpt-oss-20b --gpu 4080 --gpu 3090": How(
        Kind.PLAIN, "explain gpt-oss-20b --gpu 4080 --gpu 3090", r"(?m)^RTX 3090 +exact .*\([\d.]+-[\d.]+\)"
    ),
    ".venv/bin/microscale explain gpt-oss-120b --gpu gb10 --precision all": How(
        Kind.PLAIN, "explain gpt-oss-120b --gpu gb10 --precision all", r"(?m)^GB10 +fast .*\([\d.]+-[\d.]+\)"
    ),
    ".venv/bin/microscale bench gpt-oss-20b --load-format dummy": How(Kind.PLAIN, f"bench {REAL}", "tok/s"),
    ".venv/bin/microscale doctor": How(Kind.PLAIN, "doctor", "NVIDIA"),
    ".venv/bin/microscale quality --choice balanced --choice fast": How(
        Kind.PLAIN, "quality --choice balanced --choice fast --samples 2", r"(?m)^balanced\s+\d"
    ),
}


def shown_by(command: str) -> str:
    """The pattern in what a command of README prints, for tests that run it elsewhere."""
    return next(how.shows for how in TABLE.values() if how.arguments.split()[:1] == [command])
