"""The commands of README and docs/using.md, and how each is run on a GPU. A test holds the table against the pages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, ROOT / "docs/using.md")
REAL = "gpt-oss-20b --load-format dummy"


def commands(page: str | None = None) -> list[str]:
    """What stands after each ``$``, with lines that go on joined, and without what a comment says of it."""
    text = "".join(path.read_text() for path in PAGES) if page is None else page
    found = []
    for block in re.findall(r"```console\n(.*?)```", text, re.DOTALL):
        joined = block.replace("\\\n", " ")
        found += [re.sub(r"\s+# .*", "", line[2:]).strip() for line in joined.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s+", " ", command) for command in found]


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


OTHERS = "the other tests' command, which needs an installation of its own"
TABLE = {
    "make serve": How(Kind.SERVER, "serve", "Serving"),
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' "
    '-d \'{"messages": [{"role": "user", "content": "What is 247 + 385?"}], "temperature": 0}\'': How(
        Kind.CLIENT, shows="632"
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
    "make check": How(Kind.ELSEWHERE, because=OTHERS),
    "make test": How(Kind.ELSEWHERE, because=OTHERS),
    "make test-all": How(Kind.ELSEWHERE, because=OTHERS),
    "make prove": How(Kind.ELSEWHERE, because="all cards take a quarter of an hour, and need no GPU"),
    "make gpu-test": How(Kind.ELSEWHERE, because="this is what runs these commands"),
}


def shown_by(command: str) -> str:
    """The pattern in what a command of README prints, for tests that run it elsewhere."""
    (how,) = (how for how in TABLE.values() if how.arguments.split()[:1] == [command])
    return how.shows
