"""Graphs on paper: what a GPU would capture is noted, and a replay notes it again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from microscale.engine.graphs import Graphs


@dataclass
class Paper:
    """A device that notes what is launched."""

    ran: list[str] = field(default_factory=list)
    """What was launched outside of a capture, and what was replayed."""
    captures: list[list[str]] = field(default_factory=list)
    """What was launched within, graph by graph."""
    _open: list[str] | None = None

    def launch(self, name: str) -> str:
        """Work of one kernel, which gives its name."""
        (self.ran if self._open is None else self._open).append(name)
        return name

    @contextmanager
    def recording(self) -> Iterator[Any]:
        assert self._open is None
        noted: list[str] = []
        self._open = noted
        try:
            yield _PaperGraph(self, noted)
        finally:
            self._open = None
        self.captures.append(noted)


@dataclass
class _PaperGraph:
    paper: Paper
    noted: list[str]

    def replay(self) -> None:
        assert self.paper._open is None
        self.paper.ran += self.noted


def on_paper(monkeypatch: pytest.MonkeyPatch) -> Paper:
    """Graphs are captured on paper from now on."""
    paper = Paper()

    @contextmanager
    def recording(graphs: Graphs) -> Iterator[Any]:
        with paper.recording() as graph:
            yield graph
        graphs._memory = "a pool"

    monkeypatch.setattr(Graphs, "_recording", recording)
    return paper


def enable(graphs: Graphs) -> None:
    """Also for a model on a CPU, whose reference kernels no real graph would hold."""
    graphs.enabled = True
    graphs._uncapturable = lambda tokens: None
