"""What all tests share: which of them run at night only, and how much CPU time the others may use.

`make test` leaves out what is marked `nightly`: whole folders by the list below, single tests by their own mark.
Every other test must stay under `CPU_LIMIT_S`, its child processes included.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported: threads that wait would otherwise spin, and on a busy machine use up a test's CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import HealthCheck, settings

NIGHTLY = (
    "tests/demo",
    "tests/lab",
    "packages/ptxproof",
    "tests/server/web/test_axe.py",
    "tests/server/web/test_composer.py",
    "tests/server/web/test_formulas.py",
    "tests/server/web/test_looks.py",
    "tests/server/web/test_versions.py",
)
"""Folders and files whose tests all run at night. By day the web page's chat, list and errors are tested."""
CPU_LIMIT_S = 10.0
"""On a core as fast as `REFERENCE_S` says. A core that is slower, or shared, gets as much more."""
ON_DEMAND = {"gpu", "ray", "vllm", "shipping"}
"""Folders that have a command of their own, and no limit."""
REFERENCE_S = 0.2
"""CPU time of `_some_work` on one idle x86-64 core of a cloud machine (Python 3.11)."""

# A busy machine is not the code's fault: no test depends on how long something takes.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in one process per core; torch's own threads would only compete for them.
torch.set_num_threads(1)


@pytest.fixture
def admits_until_pages_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave requests no room to grow, so that a few short ones are enough to preempt some."""
    monkeypatch.setattr("microscale.engine.page_ledger.ROOM", 0)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="Rewrite tests/golden instead of comparing.")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without nightly tests, their modules are not even imported."""
    by_day = config.option.markexpr == "not nightly"
    return True if by_day and collection_path in {config.rootpath / name for name in NIGHTLY} else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    places = {config.rootpath / name for name in NIGHTLY}
    for item in items:
        if not places.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.nightly)


# ---- CPU time --------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def cpu_time_is_bounded(request: pytest.FixtureRequest) -> Iterator[None]:
    begin, before = time.monotonic(), _cpu_of_tree()
    yield
    nightly = request.node.get_closest_marker("nightly") or ON_DEMAND & set(request.node.path.parts)
    if nightly or time.monotonic() - begin < 2:
        return
    used = _cpu_of_tree() - before
    if used > CPU_LIMIT_S:
        # A shared core is fast in one second and slow in the next: the slowest of five speaks for the test.
        limit = CPU_LIMIT_S * max(1.0, max(_some_work() for _ in range(5)) / REFERENCE_S)
        assert used < limit, f"used {used:.1f} s of CPU, and may use {limit:.0f} s: split it, or mark it nightly"


def _some_work() -> float:
    """CPU seconds of a fixed piece of plain Python."""
    begin = time.process_time()
    total = 0
    for number in range(3_000_000):
        total += number & 7
    return time.process_time() - begin


def _cpu_of_tree() -> float:
    """CPU seconds of this process and of all its descendants, whether they live or have ended."""
    parents, used = {}, {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            with open(f"/proc/{entry.name}/stat", "rb") as file:  # Path.read_text takes three times as long
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        pid = int(entry.name)
        parents[pid] = int(fields[1])
        used[pid] = sum(map(int, fields[11:15]))  # user and system time, its own and that of children it waited for
    tree = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return sum(used.get(pid, 0) for pid in tree) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(autouse=True)
def triton_is_left_as_it_was() -> Iterator[None]:
    """Triton's settings belong to the process: a test that leaves them changed breaks the next one."""
    knobs = sys.modules.get("triton.knobs")
    groups = [] if knobs is None else [knobs.cache, knobs.compilation, knobs.runtime]
    before = [dict(vars(group)) for group in groups]
    yield
    assert [dict(vars(group)) for group in groups] == before
