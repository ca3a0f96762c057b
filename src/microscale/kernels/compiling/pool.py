"""Runs compilations in parallel, each in a process of its own, and finds the line in which a compiler reports an error.

The processes are forked. A variant holds jit functions, layouts and closures that cannot be pickled; a forked child
already has them, needs no import of torch and Triton (seconds each), and answers over a pipe in JSON. Each compilation
gets its own process instead of a place in a lasting pool: LLVM aborts on what it does not expect and ptxas sometimes
never ends, and either must cost one row of the table, not the run. Forking costs 9 ms, a compilation 0.2 to 20 s.
The parent starts no thread (the progress bar is drawn by hand), so no lock is held when it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

from triton.compiler import CompilationError

Compilation = Callable[[IO[bytes]], dict[str, Any]]
"""Takes an empty file for its log, which the parent can read when the job dies."""

PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")
# ``ptxas x.ptx, line 9; error   : Feature … not supported``, ``kernel.py:7:3: error: …`` (MLIR), ``LLVM ERROR: …``
_COMPLAINTS = (
    re.compile(r"^ptxas[\w-]* .*?(?:error|fatal)\s*:\s*(\S.*)", re.MULTILINE),
    re.compile(r"(?:: error|LLVM ERROR): (\S.*)"),
)
_REPR = re.compile(r"\w+\((['\"])(.*)\1\)")


@dataclass(frozen=True)
class Died:
    """The process ended without an answer; ``how`` completes "the compiler …", ``log`` is what it had written."""

    how: str
    log: str


@dataclass(frozen=True)
class _Worker:
    index: int
    process: multiprocessing.process.BaseProcess
    receiver: Connection
    log: IO[bytes]
    deadline: float

    def answer(self) -> dict[str, Any] | Died:
        try:
            answer: dict[str, Any] = json.loads(self.receiver.recv_bytes())
            return answer
        except EOFError:
            self.process.join()
            code = self.process.exitcode or 0
            return self.died(f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with status {code}")

    def died(self, how: str) -> Died:
        return Died(how, read_log(self.log))

    def end(self) -> None:
        if self.process.is_alive() and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # before it made its group, there was none to kill
        self.process.join()
        self.receiver.close()
        self.log.close()


def die_with_parent(signum: signal.Signals) -> None:
    """This process gets the signal when the thread that started it ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def read_log(log: IO[bytes]) -> str:
    """All that is in the file, also where a writer stopped midway."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")


def run_forked(
    jobs: Sequence[Compilation], *, num_workers: int, limit_s: float = 900.0
) -> Iterator[tuple[int, dict[str, Any] | Died]]:
    """Yield each job's index and answer as it ends. ``limit_s`` is the time that one job may take."""
    waiting = deque(range(len(jobs)))
    running: list[_Worker] = []
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                index = waiting.popleft()
                running.append(_start(index, jobs[index], time.monotonic() + limit_s))
            patience = min(worker.deadline for worker in running) - time.monotonic()
            ready = wait([worker.receiver for worker in running], timeout=max(0.0, patience))
            for worker in list(running):
                if worker.receiver in ready:
                    answer = worker.answer()
                elif worker.deadline <= time.monotonic():
                    answer = worker.died(f"did not end within {limit_s:g} s")
                else:
                    continue
                running.remove(worker)
                worker.end()
                yield worker.index, answer
    finally:
        for worker in running:
            worker.end()


def _start(index: int, job: Compilation, deadline: float) -> _Worker:
    receiver, sender = _FORK.Pipe(duplex=False)
    log = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the worker ends)
    process = _FORK.Process(target=_child, args=(job, log, sender))
    process.start()
    sender.close()
    return _Worker(index, process, receiver, log, deadline)


def _child(job: Compilation, log: IO[bytes], sender: Connection) -> None:
    die_with_parent(signal.SIGKILL)
    # A group of its own, so that ending a stuck compilation ends its ptxas too.
    os.setpgid(0, 0)
    sender.send_bytes(json.dumps(job(log)).encode())
    sender.close()


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
    """Keep the compiler's output off the terminal; yields a function that returns all of it so far.

    Triton prints in Python, MLIR and LLVM write to file descriptor 2.
    """
    printed = io.StringIO()
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield lambda: printed.getvalue() + read_log(log)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
