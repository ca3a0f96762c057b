"""README's commands: every one is known to the tests that run them on a GPU, and those that need none run here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from microscale.cli import COMMANDS
from support.readme import TABLE, Kind, commands

PAGE = """
```console
$ one  a   # says something
printed
$ two 'x' \\
    --more
```
text $ none
"""


def test_commands_are_found() -> None:
    assert commands(PAGE) == ["one a", "two 'x' --more"]


def test_every_command_of_readme_is_in_the_table_and_the_other_way_round() -> None:
    found = commands()
    assert len(found) == len(set(found))
    assert set(found) == set(TABLE)


def test_what_runs_says_what_it_shows_and_what_does_not_says_why() -> None:
    for how in TABLE.values():
        assert bool(how.because) == (how.kind is Kind.ELSEWHERE)
        if how.kind in (Kind.PLAIN, Kind.SERVER, Kind.TERMINAL):
            assert how.arguments.split()[0] in COMMANDS
            assert how.shows


def test_make_targets_exist() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    for command in commands():
        if command.startswith("make "):
            assert re.search(rf"(?m)^{command.removeprefix('make ')}:", makefile)


@pytest.mark.parametrize("name", ["explain", "doctor"])
def test_commands_that_need_no_gpu(name: str) -> None:
    how = next(how for how in TABLE.values() if how.arguments.split()[:1] == [name])
    done = subprocess.run(
        [sys.executable, "-m", "microscale", *shlex.split(how.arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    if name == "explain":
        assert re.search(how.shows, done.stdout)
