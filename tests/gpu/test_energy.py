"""The energy counter of a real GPU."""

from __future__ import annotations

import time

import torch

from microscale.bench.energy import EnergyMeter


def test_a_second_of_products_takes_what_the_card_may_take() -> None:
    meter = EnergyMeter(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    before, start = meter.joules(), time.perf_counter()
    while time.perf_counter() - start < 1.5:
        a @ a
        torch.cuda.synchronize()
    watts = (meter.joules() - before) / (time.perf_counter() - start)
    assert 50 < watts < 1500
