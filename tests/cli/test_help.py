"""``--help`` of every command, as in a terminal of 80 columns."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from microscale.cli import COMMANDS, bench
from microscale.cli.group import load_command
from microscale.cli.help import REST, TITLES


def commands() -> Iterator[tuple[str, Any]]:
    for name, place in COMMANDS.items():
        if name != "bench":
            yield name, load_command(name, place)
    for name, place in bench.COMMANDS.items():
        yield f"bench {name}", load_command(name, place)


ALL = dict(commands())


def parsed(command: Any, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Option → its group, and option → the line that it is named in."""
    context = command.make_context(name, [], resilient_parsing=True, terminal_width=80, max_content_width=80)
    text = command.get_help(context)
    groups, lines, title = {}, {}, ""
    for line in text.splitlines():
        assert len(line) <= 80 or line.startswith("  -"), line
        if heading := re.fullmatch(r"(\S.*):", line):
            title = heading[1]
        elif re.match(r"  -", line):
            for spelled in re.findall(r"(?<![\w|-])--?[a-z][\w-]*", line):
                groups[spelled], lines[spelled] = title, line
    return groups, lines


@pytest.mark.parametrize("name", ALL)
def test_every_option_is_in_a_group_with_its_full_name(name: str) -> None:
    command = ALL[name]
    groups, lines = parsed(command, name)
    options = [each for each in command.params if each.param_type_name == "option"]
    for option in options:
        for spelled in (*option.opts, *option.secondary_opts):
            assert groups[spelled] in TITLES, spelled
            assert not re.search("…|<|>", lines[spelled])
        assert option.is_flag or re.search(r" \S", lines[option.opts[0]].strip()), f"{option.opts[0]} takes what?"
    assert {spelled for spelled, title in groups.items() if title == REST} == {"-h", "--help"}


def test_choices_are_shown() -> None:
    _, lines = parsed(ALL["serve"], "serve")
    assert lines["--precision"].endswith("exact|balanced|fast|auto")
    assert lines["--load-format"].endswith("auto|safetensors|dummy")
    assert lines["--enable-prefix-caching"].endswith("--no-enable-prefix-caching")


def test_completion_is_installed_at_the_top_only() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "microscale", "bench", "--help"], capture_output=True, text=True, check=True
    )
    assert "--install-completion" not in run.stdout
    assert "..." not in run.stdout.partition("Commands:")[2]
