"""Our expert kernels, on the architectures that `make test` has time for; `make prove` does all ops on all of them."""

from __future__ import annotations

import re

import pytest

from microscale import settings
from microscale.backends import registry
from microscale.hardware import known
from microscale.prove import prove


@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["h200", "rtx5090", "gb10"])
def test_every_expert_kernel_is_proved(gpu: str) -> None:
    rows = prove(registry.IMPLEMENTATIONS, [gpu], ops=["moe"], cache_dir=settings.load().cache_dir)
    assert rows
    refused = [f"{row.op} {row.variant}: {row.reason}" for row in rows if not row.ok]
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize("gpu", ["rtx5090", "gb10"])
@pytest.mark.parametrize("name", ["triton_w4a8", "triton_w8a8"])
def test_block_scaled_arithmetic_is_promised_where_the_card_has_it(name: str, gpu: str) -> None:
    """Without a promise the gate could not tell a fall-back to BF16 from what was meant."""
    promises = [variant.promise or "" for variant in registry.find("moe", name).variants(known(gpu))]
    instruction = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0"
    fallback = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    kept = [promise for promise in promises if re.search(promise, instruction) and not re.search(promise, fallback)]
    assert kept, f"{name} promises no block-scaled mma.sync on {gpu}"
