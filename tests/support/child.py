"""Modules of the tests as processes of their own, wherever the tests are started."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
RUN = "import runpy, sys; sys.path.insert(0, {path!r}); runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"


def as_process(module: str, *arguments: str) -> tuple[str, ...]:
    """The command that runs ``module``, such as ``support.thin_rank``."""
    return (sys.executable, "-P", "-c", RUN.format(path=str(TESTS), name=module), *arguments)
