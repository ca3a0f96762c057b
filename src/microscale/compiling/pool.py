"""Runs compilations side by side, each in a process of its own.

The processes are forked. A variant holds jit functions, layouts and closures that cannot be pickled; a forked child
already has them, needs no import of torch and Triton (seconds each), and answers over a pipe in JSON. One process per
compilation, not a lasting pool: LLVM aborts on what it does not expect and ptxas sometimes never ends, and either must
cost one row of the table, not the run. Forking costs 9 ms beside 0.2 to 20 s of compilation. The parent starts
no thread (the progress bar is drawn by hand), so no lock is held when it forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import IO, Any

Job = Callable[[IO[bytes]], dict[str, Any]]
"""Takes an empty file for its log, which the parent can read when the job dies."""

PR_SET_PDEATHSIG = 1
_FORK = multiprocessing.get_context("fork")


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
    """All that is in the file, whoever wrote it and wherever they stopped."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")


def run_forked(
    jobs: Sequence[Job], *, num_workers: int, limit_s: float = 900.0
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


def _start(index: int, job: Job, deadline: float) -> _Worker:
    receiver, sender = _FORK.Pipe(duplex=False)
    log = tempfile.TemporaryFile()  # noqa: SIM115  (closed when the worker ends)
    process = _FORK.Process(target=_child, args=(job, log, sender))
    process.start()
    sender.close()
    return _Worker(index, process, receiver, log, deadline)


def _child(job: Job, log: IO[bytes], sender: Connection) -> None:
    die_with_parent(signal.SIGKILL)
    # A group of its own, so that ending a stuck compilation ends its ptxas too.
    os.setpgid(0, 0)
    sender.send_bytes(json.dumps(job(log)).encode())
    sender.close()
