"""``microscale serve`` as its users start it, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.ending import end

PATIENCE_S = 120.0


@contextmanager
def serving(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """The address of a server on a free port of this machine, once it is ready. It is killed at the end."""
    command = [sys.executable, "-m", "microscale", "serve", *arguments, "--device", "cpu", "--port", "0"]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=errors, stderr=errors, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"Serving .* at (http://\S+)", log.read_text())):
            if time.monotonic() > deadline or process.poll() is not None:
                raise AssertionError(log.read_text())
            time.sleep(0.1)
        yield found.group(1)
    finally:
        end(process)
