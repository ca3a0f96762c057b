"""What a draft head's pass has beside its layer, in Triton against its reference. Runs under the interpreter."""

from __future__ import annotations

import pytest
import torch

from microscale import hardware
from microscale.planning import registry
from microscale_lab.cases.case import KernelCase, hold
from microscale_lab.cases.head_passes import cases
from microscale_lab.cases.small import normal

GPU = hardware.known("h200")


@pytest.mark.parametrize("width", [160, 300])
def test_the_pair_is_both_norms_bit_for_bit(width: int) -> None:
    """So a head drafts the same tokens with it as without."""
    ops = registry.small("triton_small").on(GPU)
    table, hidden = normal(9, width, device="cpu", size=3.0), normal(4, width, device="cpu", seed=1)
    weights = normal(2, width, device="cpu", seed=2)
    ids = torch.tensor([8, 0, 3, 3])
    found = ops.norm_pair(table, ids, hidden, weights, 1e-5)
    apart = ops.rms_norm(table[ids], weights[0], 1e-5), ops.rms_norm(hidden, weights[1], 1e-5)
    assert torch.equal(found, torch.cat(apart, dim=1))


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.name)
def test_as_the_reference(case: KernelCase) -> None:
    hold(case.start(GPU, "cpu")())
