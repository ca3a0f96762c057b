"""How tests end a process that they started."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import Any

MEASURED = "COVERAGE_PROCESS_CONFIG" in os.environ
"""`make coverage` tells child processes in this variable what to measure."""
PATIENCE_S = 10.0


def end(process: subprocess.Popen[Any]) -> None:
    """Kill it. Where coverage is measured it is asked first, since a process that is killed saves nothing."""
    if MEASURED and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    process.kill()
    process.wait()
