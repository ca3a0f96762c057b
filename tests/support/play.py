"""``pytest tests/gpu --as gb10``: the GPU tests with another card's kernels, on the GPU at hand.

The card takes hold before test modules are imported, since many of them ask which GPU there is. With ``-n 8`` the tests
share the one GPU and compile in parallel, which is most of their time; a second run finds the kernels in Triton's
cache. At the end a line says which card it was, how many kernels ran and what was spelled out in them, and there is one
for each reason why tests were skipped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from microscale.errors import MicroscaleError
from microscale.hardware import known, present
from microscale_lab.prove.bridge import as_card, card_of
from ptxproof import CardRun


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--as", dest="card", metavar="CARD", help="Run the kernels of this card (gb10, rtx4090 …) on the GPU at hand."
    )


def play(config: pytest.Config) -> None:
    """From here to the end of the session the GPU passes for the card of ``--as``, where there is one."""
    name = config.getoption("card", None)
    if name is None:
        return
    try:
        config.pluginmanager.register(Played(config, name), "played")
    except MicroscaleError as error:
        raise pytest.UsageError(f"--as {name}: {error}") from None


def is_played(config: pytest.Config) -> bool:
    return config.pluginmanager.has_plugin("played")


class Played:
    """Counts what was executed, in this process and in those of ``-n``."""

    def __init__(self, config: pytest.Config, name: str) -> None:
        self.stack = ExitStack()
        card = known(name)
        if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
            self.executed = CardRun(card_of(card), card_of(present()))  # the workers run the tests
        else:
            self.executed = self.stack.enter_context(as_card(card))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["executed"] = {kernel: dict(forms) for kernel, forms in self.executed.by_kernel.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for kernel, forms in getattr(node, "workeroutput", {}).get("executed", {}).items():
            self.executed.by_kernel[kernel] = Counter(forms)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"as {self.executed.card.name}")
        for line in skipped(terminalreporter.stats.get("skipped", [])):
            terminalreporter.write_line(line)
        terminalreporter.write_line(self.executed.summary())

    def pytest_unconfigure(self) -> None:
        self.stack.close()


def skipped(reports: list[pytest.TestReport]) -> Iterator[str]:
    """Each reason once, with how many tests it kept from running."""
    reasons = [report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple)]
    for reason, count in Counter(reasons).most_common():
        yield f"skipped {count}: {reason.removeprefix('Skipped: ')}"
