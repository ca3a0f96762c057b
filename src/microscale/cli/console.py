"""Printing: results go to standard output; progress, logs and errors go to standard error."""

from __future__ import annotations

import json
import logging
import re
from enum import StrEnum
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape

from microscale.errors import BadSetting

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_wrapped(console: Console, text: str) -> None:
    """Print markup. Lines break between words in a terminal; elsewhere a paragraph is one line, for programs."""
    console.print(text, soft_wrap=not console.is_terminal)


def print_error(console: Console, text: str) -> None:
    print_wrapped(console, f"[bold red]error:[/] {escape(text)}")


class ConsoleLog(logging.Handler):
    """Our own log on standard error, plain."""

    def emit(self, record: logging.LogRecord) -> None:
        print_wrapped(err, escape(self.format(record)))


def show_log() -> None:
    """Show the package's log on standard error."""
    logger = logging.getLogger("microscale")
    logger.setLevel(logging.INFO)
    logger.handlers = [ConsoleLog()]


def print_json(value: Any) -> None:
    """JSON on standard output, plain, for programs."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def parse_numbers(option: str, text: str) -> list[int]:
    """``1,2,3`` as numbers."""
    if not re.fullmatch(r"\s*[0-9]{1,18}\s*(,\s*[0-9]{1,18}\s*)*", text, re.ASCII):
        raise BadSetting(f"{option} takes numbers separated by commas, such as 1,2,3, not {text[:80]!r}.")
    return [int(part) for part in text.split(",")]


def parse_choice(option: str, text: str, choices: type[ChoiceT]) -> ChoiceT:
    """One of the values of an enumeration."""
    try:
        return choices(text)
    except ValueError:
        raise BadSetting(f"{option} {text[:80]!r} is not one of {', '.join(choices)}.") from None
