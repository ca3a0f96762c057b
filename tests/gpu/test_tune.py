"""Tuning on the present GPU: a few tiles of each kernel are right, timed, and written where kernels would read them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from microscale.bench.tune import JOBS, tune
from microscale.hardware import detect
from microscale.hardware.tiles import attention, dense, experts, gemm, tuned
from microscale.hardware.tiles.tuned import Kernels

pytestmark = [
    pytest.mark.odd_shapes,
    pytest.mark.own("tiles are measured on the GPU as it is: no card is tuned by another's clocks"),
]
SECTIONS: dict[str, tuned.Section[Any, Any]] = {
    section.name: section for section in (gemm.SECTION, attention.SECTION, experts.SECTION, dense.SECTION)
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kernels", list(JOBS))
def test_a_quick_look(tmp_path: Path, kernels: Kernels) -> None:
    gpu = detect()
    file = tune(gpu, tmp_path, kernels=[kernels], quick=True)
    found = tuned.read(file, SECTIONS[kernels], gpu.family)
    assert found
    for row in found.values():
        assert row.measured.gpu == gpu.name
        assert row.measured.us is not None
        assert 0 < row.measured.us < 1e5
        assert "microscale tune" in row.measured.run
