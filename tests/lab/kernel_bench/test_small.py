"""The benchmark of the small ops without a GPU: every work runs on the reference, and a wrong answer is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from microscale import hardware
from microscale.errors import Unsupported
from microscale.kernels.small.reference import ReferenceSmall
from microscale_lab.kernel_bench import small as bench
from microscale_lab.kernel_bench import timing
from microscale_lab.kernel_bench.rows import WrongResult
from microscale_lab.kernel_bench.timing import Ceilings

CEILINGS = Ceilings(4550.0, 800.0)


@pytest.fixture
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs on the CPU, the reference in place of the kernels, and a clock that says 2 µs a call."""
    monkeypatch.setattr(bench, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "TritonSmall", lambda gpu: ReferenceSmall())
    monkeypatch.setattr(bench, "graph_us", lambda work, repeats: 2.0 * len(work()))


@pytest.mark.usefixtures("_on_the_cpu")
@pytest.mark.parametrize("make", bench.WORK)
def test_every_work_is_checked_and_timed(make: Callable[[int], bench.SmallWork]) -> None:
    row = bench.measure([make(3), make(3)], 3, hardware.known("h200"), CEILINGS, repeats=1)
    assert row.us == 2.0
    assert row.rms_error == 0.0
    assert row.memory_bound
    assert row.floor_us == pytest.approx(make(3).num_bytes / 4.55e6)


@pytest.mark.usefixtures("_on_the_cpu")
def test_a_wrong_answer_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(ReferenceSmall):
        def gated(self, gate_up: torch.Tensor, gate: object) -> torch.Tensor:
            return gate_up[:, : gate_up.shape[1] // 2]

    monkeypatch.setattr(bench, "TritonSmall", lambda gpu: Wrong())
    with pytest.raises(WrongResult, match="gated"):
        bench.measure([bench.gated(2)], 2, hardware.known("h200"), CEILINGS, repeats=1)


def test_a_machine_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "detect", hardware.cpu)
    with pytest.raises(Unsupported, match="need a GPU"):
        next(bench.run())
