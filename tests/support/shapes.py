"""Weights and tokens that are shapes alone, and what an implementation starts with them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from microscale.formats import FORMATS, ChannelScaled, without_memory
from microscale.hardware import Gpu
from microscale.kernels.dense.spec import DenseOp, DenseSpec, DenseWeights
from microscale.kernels.launch import Kernel, recording
from microscale_lab.calls import run_dense, run_logits


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def dense_shapes(fmt: str, rows: int, columns: int) -> DenseWeights:
    """A dense layer with a bias."""
    if fmt == "bf16":
        return DenseWeights(meta(rows, columns), meta(rows))
    if fmt == "fp8":
        scales = meta(rows, dtype=torch.float32)
        return DenseWeights(ChannelScaled(meta(rows, columns, dtype=torch.uint8), scales), meta(rows))
    return DenseWeights(without_memory((rows, columns), FORMATS[fmt]), meta(rows))


def record_dense(implementation: DenseOp[Any], spec: DenseSpec, gpu: Gpu, tokens: Iterable[int]) -> list[Kernel]:
    """Every kernel that the layer, also as an lm_head, starts for these numbers of tokens."""
    packed = implementation.pack(dense_shapes(spec.weight_format, spec.rows, spec.columns), spec)
    with recording() as found:
        for count in tokens:
            x = meta(count, spec.columns)
            run_dense(implementation, packed, spec, gpu, x)
            run_logits(implementation, packed, spec, gpu, x)
    return list(found)
