"""The benchmark of dense layers without a GPU: its weights are ordinary numbers in every format; a CPU is refused."""

from __future__ import annotations

import pytest
import torch

from microscale.errors import Unsupported
from microscale.kernels.dense.reference import dense
from microscale.kernels.dense.spec import FORMATS
from microscale_lab.kernel_bench import dense as bench
from microscale_lab.kernel_bench.dense import SHAPES, DenseShape, random_weights


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_layer_that_is_timed_has_ordinary_numbers(fmt: str) -> None:
    weights = random_weights(DenseShape("small", 256, 320), fmt, torch.Generator().manual_seed(0))
    assert weights.format == fmt
    y = dense(torch.randn(4, 320, generator=torch.Generator().manual_seed(1)), weights)
    assert 0.05 < float(y.square().mean().sqrt()) < 50


def test_the_shapes_are_those_of_the_targets() -> None:
    assert [(shape.rows, shape.columns) for shape in SHAPES] == [(5120, 2880), (2880, 4096), (201088, 2880)]
    assert [i.name for i in bench._implementations("bf16")] == ["triton_bf16", "dequantized"]
    assert all([i.name for i in bench._implementations(fmt)] == [f"triton_{fmt}"] for fmt in FORMATS[1:])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_refused() -> None:
    with pytest.raises(Unsupported, match="need a GPU"):
        next(bench.run())
