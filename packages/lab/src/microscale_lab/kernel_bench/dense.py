"""``microscale bench kernels dense``: gpt-oss's dense layers in every weight format, from one token to a prefill chunk.

Each row is checked against the float32 reference on a sample of tokens before it is timed. Weights rotate over enough
layers that none is read from L2. Times are of CUDA-graph replays; ``torch`` is cuBLAS on bf16 weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from microscale.errors import BadSetting
from microscale.formats import FORMATS, BlockScaled, ChannelScaled
from microscale.hardware import Gpu
from microscale.kernels.dense import small_batch, unpack
from microscale.kernels.dense.cost import activation_bytes, dense_flops, weight_bytes
from microscale.kernels.dense.reference import dense
from microscale.kernels.dense.spec import FORMATS as WEIGHT_FORMATS
from microscale.kernels.dense.spec import DenseOp, DenseSpec, DenseWeights
from microscale.kernels.op import Activations
from microscale.planning import registry
from microscale_lab.calls import run_dense, run_logits
from microscale_lab.kernel_bench.rows import KernelRow, check, counting, row
from microscale_lab.kernel_bench.timing import Ceilings, graph_us, measure_ceilings, present_gpu
from microscale_lab.predict.measured_as import path_name

TOKENS = (1, 2, 4, 8, 16, 64, 512, 4096)
ROTATED_BYTES = 256 << 20
"""Five times the H200's L2."""
CHECKED_TOKENS = 16
CHECKED_ROWS = 4096
# One rounding to bf16 is 1.6e-3 RMS, at most 2.3e-3 whatever the numbers (2**-8 over the root of 3).
RMS_TOLERANCE = 2.3e-3


@dataclass(frozen=True)
class DenseShape:
    """One matrix: outputs and inputs per token."""

    name: str
    rows: int
    columns: int
    is_head: bool = False
    """An lm_head gives float32 logits with their blocks, and has no bias."""


SHAPES = (DenseShape("qkv", 5120, 2880), DenseShape("o", 2880, 4096), DenseShape("lm_head", 201088, 2880, is_head=True))


def formats(name: str | None) -> Sequence[str]:
    """One weight format by its name, or all."""
    if name is None:
        return WEIGHT_FORMATS
    if name not in WEIGHT_FORMATS:
        raise BadSetting(f"Unknown weight format {name!r}; known are {', '.join(WEIGHT_FORMATS)}.")
    return (name,)


def run(
    tokens: Sequence[int] = TOKENS,
    shapes: Sequence[DenseShape] = SHAPES,
    formats: Sequence[str] = WEIGHT_FORMATS,
    repeats: int = 20,
) -> Iterator[KernelRow]:
    """Rows as they are measured. The first comes after the ceilings, some seconds in."""
    gpu = present_gpu()
    ceilings = measure_ceilings()
    for shape in shapes:
        for weight_format in formats:
            for implementation in _implementations(weight_format):
                yield from _measure(shape, weight_format, implementation, tokens, repeats, gpu, ceilings)
                torch.cuda.empty_cache()


def _implementations(weight_format: str) -> list[DenseOp[Any]]:
    """Ours for the format, and for bf16 cuBLAS as the oracle may choose it."""
    names = ["triton_bf16", "dequantized"] if weight_format == "bf16" else [f"triton_{weight_format}"]
    return [registry.dense(name) for name in names]


def random_weights(shape: DenseShape, weight_format: str, generator: torch.Generator) -> DenseWeights:
    """Weights of about unit gain with a bias: every code is as likely as any other."""
    rows, columns = shape.rows, shape.columns
    device = generator.device
    bias = None if shape.is_head else torch.randn(rows, device=device, generator=generator).mul(0.1).bfloat16()

    def random_bytes(low: int, high: int, width: int) -> Tensor:
        return torch.randint(low, high, (rows, width), dtype=torch.uint8, device=device, generator=generator)

    if weight_format == "bf16":
        weight = torch.randn(rows, columns, device=device, generator=generator, dtype=torch.bfloat16)
        return DenseWeights(weight.mul_(columns**-0.5), bias)
    if weight_format == "fp8":  # codes up to 0x47 are below 4.0: no NaN among them
        scales = torch.rand(rows, device=device, generator=generator).mul(0.01).add(0.01)
        return DenseWeights(ChannelScaled(random_bytes(0, 0x48, columns), scales), bias)
    fmt = FORMATS[weight_format]
    values = random_bytes(0, 256 if fmt.bits == 4 else 0x48, columns * fmt.bits // 8)
    if fmt.scale_bytes == 4:
        scales = torch.rand(rows, columns // 128, device=device, generator=generator).add(0.5).mul(2.0**-6).bfloat16()
        scales = scales.float().repeat_interleave(128 // fmt.block, 1)
        scales = F.pad(scales, (0, columns // fmt.block - scales.shape[1]), value=2.0**-6)
        return DenseWeights(BlockScaled(values, scales.contiguous(), fmt), bias)
    if not fmt.has_row_scales:
        return DenseWeights(BlockScaled(values, random_bytes(117, 121, columns // fmt.block), fmt), bias)
    row_scales = (torch.rand(rows, device=device, generator=generator) + 0.5) * 2.0**-16
    scales = random_bytes(0x60, 0x7E, columns // fmt.block)
    return DenseWeights(BlockScaled(values, scales, fmt, row_scales), bias)


def roundings(weight_format: str, tokens: int, gpu: Gpu) -> int:
    """To bf16, on the way to an output: its own, and that of weights unpacked with the scales of their rows, of FP8
    blocks in a GEMM also."""
    in_gemm = weight_format == "fp8_block" and tokens > small_batch.MAX_TOKENS
    return 2 if in_gemm or (weight_format in ("fp8", "nvfp4") and unpack.pays(tokens, gpu)) else 1


def _measure(
    shape: DenseShape,
    weight_format: str,
    implementation: DenseOp[Any],
    tokens: Sequence[int],
    repeats: int,
    gpu: Gpu,
    ceilings: Ceilings,
) -> Iterator[KernelRow]:
    generator = torch.Generator("cuda").manual_seed(shape.rows)

    def spec_of(count: int) -> DenseSpec:
        return DenseSpec(shape.rows, shape.columns, weight_format, Activations.BF16, not shape.is_head, count)

    def run_one(weights: Any, spec: DenseSpec, x: Tensor) -> Tensor:
        """As a model starts it."""
        if shape.is_head:
            return run_logits(implementation, weights, spec, gpu, x).values
        return run_dense(implementation, weights, spec, gpu, x)

    layers = max(1, -(-ROTATED_BYTES // weight_bytes(spec_of(1))))
    first = random_weights(shape, weight_format, generator)
    packed = [implementation.pack(first, spec_of(1))]
    for _ in range(layers - 1):
        packed.append(implementation.pack(random_weights(shape, weight_format, generator), spec_of(1)))
    head = DenseWeights(first.weight[:CHECKED_ROWS], None if first.bias is None else first.bias[:CHECKED_ROWS])
    for count in tokens:
        if implementation.name == "triton_bf16" and count > small_batch.MAX_TOKENS:
            continue  # it would read the weights several times, and cuBLAS shares its layout
        case = f"{shape.name} {weight_format}, {count} tokens"
        spec = spec_of(count)
        inputs = [
            torch.randn(count, shape.columns, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in packed
        ]
        with counting(path_name(implementation, shape.name, spec, gpu)) as launched:
            y = run_one(packed[0], spec, inputs[0])[:CHECKED_TOKENS, :CHECKED_ROWS].float()
        expected = dense(inputs[0][:CHECKED_TOKENS], head)
        error = float((y - expected).norm() / expected.norm())
        check(
            implementation.name, case, gpu.name, error, RMS_TOLERANCE * math.sqrt(roundings(weight_format, count, gpu))
        )

        def ours(inputs: list[Tensor] = inputs, spec: DenseSpec = spec) -> None:
            for weights, x in zip(packed, inputs, strict=True):
                run_one(weights, spec, x)

        us = graph_us(ours, repeats) / layers
        other = _cublas_us(packed, inputs, repeats) if implementation.name == "triton_bf16" else None
        num_bytes = weight_bytes(spec) + activation_bytes(spec)
        entry = ("dense", case, implementation.name, us, num_bytes, dense_flops(spec), ceilings, error, other)
        yield replace(row(*entry), launched=launched[0])


def _cublas_us(packed: Sequence[DenseWeights], inputs: Sequence[Tensor], repeats: int) -> float:
    """The same layers through torch."""

    def theirs() -> None:
        for weights, x in zip(packed, inputs, strict=True):
            assert isinstance(weights.weight, Tensor)
            F.linear(x, weights.weight, weights.bias)

    return graph_us(theirs, repeats) / len(packed)
