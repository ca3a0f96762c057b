"""The start of a command in a real terminal: a line at once, and a loading bar that shares its line with nobody."""

from __future__ import annotations

import re
import sys

import pytest

from support.noisy_engine import LAYERS
from support.terminal import drawn_lines, terminal

# Says when torch is looked for, and ends there: what was printed by then came first.
UNTIL_LARGE = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "fastapi"):
            print(f"IMPORT {name}", file=sys.stderr, flush=True)
            sys.exit(3)

sys.meta_path.insert(0, Finder())
sys.argv[0] = "microscale"
from microscale.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("command", "large"),
    [
        ("serve", "fastapi"),
        ("generate demo --prompt-ids 1", "torch"),
        ("explain gpt-oss-20b", "torch"),
        ("quality", "torch"),
    ],
)
def test_a_line_is_printed_before_anything_large_is_imported(command: str, large: str) -> None:
    with terminal((sys.executable, "-c", UNTIL_LARGE, *command.split())) as screen:
        assert screen.wait() == 3
        name = command.split()[0]
        assert re.match(rf"microscale {name} \S+ starts …\s+IMPORT {large}", screen.text.replace("\r", ""))


def test_help_begins_with_the_help() -> None:
    with terminal((sys.executable, "-m", "microscale", "serve", "--help")) as screen:
        assert screen.wait() == 0
        assert screen.text.split()[0] == "Usage:"


@pytest.mark.parametrize("arguments", [(), ("ahead",)])
def test_bar_and_log_have_lines_of_their_own(arguments: tuple[str, ...]) -> None:
    """Whether the engine is started then, or was before."""
    with terminal((sys.executable, "-m", "support.noisy_engine", *arguments)) as screen:
        screen.expect(r"Serving at http")
        screen.press("c")
        assert screen.wait() == 0
        left, drawn = drawn_lines(screen.raw)
        bars = [line for line in drawn if "━" in line]
        assert bars, "there was a bar"
        drawn_bar = re.compile(r"Loading noise [━╸╺]+ +\d+/12 bytes (\?|[\d.]+ \S+/s) 0:00:\d\d *")
        compiling = re.compile(r"Loading noise [━╸╺]+ +5/7 kernels 0:00:\d\d *")
        assert all(drawn_bar.fullmatch(line) or compiling.fullmatch(line) for line in bars)
        assert any(compiling.fullmatch(line) for line in bars), "kernels follow the weights in the same bar"
        assert not any("━" in line for line in left), "it is gone"
        noise = [line for line in left if line.startswith("noise")]
        assert noise == [f"noise {number} of the engine ends" for number in range(LAYERS + 1)]
        assert left[0].startswith("engine: The engine is about to load: options known")
        assert left[1] == "before the bar"


def test_an_error_before_the_engine_is_asked_does_not_wait_for_it() -> None:
    """One that was started ahead in a terminal is let go, and its terminal ends with it."""
    with terminal((sys.executable, "-m", "support.noisy_engine", "ahead", "leaves")) as screen:
        assert screen.wait() == 0
        assert "0 threads wait for it" in screen.text
