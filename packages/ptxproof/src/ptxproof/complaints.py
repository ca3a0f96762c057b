"""Finds the one line of a compiler's output that says what is wrong."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Callable, Iterator
from typing import IO

from triton.compiler import CompilationError

# ``ptxas x.ptx, line 9; error   : Feature … not supported``, ``kernel.py:7:3: error: …`` (MLIR), ``LLVM ERROR: …``
_COMPLAINTS = (
    re.compile(r"^ptxas[\w-]* .*?(?:error|fatal)\s*:\s*(\S.*)", re.MULTILINE),
    re.compile(r"(?:: error|LLVM ERROR): (\S.*)"),
)
_REPR = re.compile(r"\w+\((['\"])(.*)\1\)")


def reason(error: Exception, log: str) -> str:
    """Why a compilation failed, from what it raised and what it wrote."""
    if complaint := find_complaint(log):
        return complaint
    cause: BaseException = error
    while isinstance(cause, CompilationError) and cause.__cause__ is not None:
        cause = cause.__cause__
    # A CompilationError's text is an excerpt of the source and then the message, often the repr of an exception.
    message = (cause.error_message or "") if isinstance(cause, CompilationError) else str(cause)
    if wrapped := _REPR.fullmatch(message.strip()):
        message = wrapped[2]
    return next(iter(message.strip().splitlines()), type(cause).__name__)


def find_complaint(log: str) -> str | None:
    """The first line in which ptxas, MLIR or LLVM says what is wrong."""
    for pattern in _COMPLAINTS:
        if found := pattern.search(log):
            return found[1].strip()
    return None


@contextlib.contextmanager
def captured(log: IO[bytes]) -> Iterator[Callable[[], str]]:
    """Keep the compiler's output from the terminal; yields a function that gives all that it wrote so far.

    Triton prints in Python, MLIR and LLVM write to file descriptor 2.
    """
    printed = io.StringIO()
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield lambda: printed.getvalue() + _read_log(log)
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _read_log(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
