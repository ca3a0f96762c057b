"""What only some CPUs have."""

from __future__ import annotations

from pathlib import Path

import pytest

NEEDS_AMX = pytest.mark.skipif(
    "amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="vLLM's own MXFP4 experts on a CPU need AMX"
)
