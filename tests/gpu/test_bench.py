"""Benchmarks time what is proved: every kernel that they start is recorded for this card (``conftest``)."""

from __future__ import annotations

import pytest

from microscale.bench import model
from microscale.bench.cases import make_cases
from microscale.engine.config import EngineConfig
from microscale.hardware import detect
from microscale.kernels.op import Activations
from microscale.models.outline import outline
from microscale.planning.plan import Setup
from microscale_lab.kernel_bench import kernels, moe
from microscale_lab.kernel_bench.kernels import KernelBench
from support.loading import load_model

TOKENS = {KernelBench.DENSE: (1, 16, 64, 512), KernelBench.SMALL: (1, 64), KernelBench.SAMPLING: (1, 8)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("op", list(KernelBench))
def test_kernels_of_an_op(op: KernelBench) -> None:
    if op is KernelBench.MOE:
        rows = [row for name in moe.LAYERS for row in kernels.run(op, name, (1, 2, 8, 64, 1024))]
    else:
        rows = list(kernels.run(op, tokens=TOKENS.get(op)))
    assert rows


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["gpt-oss-20b", "gemma-4-26b-a4b", "qwen3-30b-a3b"])
def test_steps_of_a_model(name: str) -> None:
    """Prompts and decoding, at the model's full width and in fewer layers."""
    overrides = {"num_hidden_layers": 6}
    loaded = load_model(EngineConfig(name, load_format="dummy", device="cuda", hf_overrides=overrides))
    described = outline(name, loaded.config, Activations.BF16, loaded.page_size, 4096)
    cases = make_cases(["pp512", "pp2048", "tg32"], [1, 8, 64], [128])
    assert list(model.run(loaded, described, Setup(detect(), Activations.BF16), cases, repeats=1))
