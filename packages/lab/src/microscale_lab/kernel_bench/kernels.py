"""``microscale bench kernels OP``: which rows each op has, and the options that they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

from microscale.errors import BadSetting
from microscale.kernels.op import Activations
from microscale_lab.kernel_bench import attention, dense, formats, moe, sampling, small
from microscale_lab.kernel_bench.rows import KernelRow


class KernelBench(StrEnum):
    """The ops that can be timed by themselves."""

    MOE = "moe"
    DENSE = "dense"
    FORMATS = "formats"
    ATTENTION = "attention"
    SMALL = "small"
    SAMPLING = "sampling"


def run(
    op: KernelBench,
    model: str | None = None,
    tokens: Sequence[int] | None = None,
    activations: Activations = Activations.BF16,
    weight_format: str | None = None,
) -> Iterator[KernelRow]:
    """The rows of an op, as they are measured. An option that the op does not know is refused."""
    if weight_format is not None and op not in (KernelBench.MOE, KernelBench.DENSE, KernelBench.FORMATS):
        raise BadSetting(f"--format belongs to `bench kernels moe`, `dense` and `formats`, not to {op}.")
    if op is not KernelBench.MOE and activations is not Activations.BF16:
        raise BadSetting(f"--activations belongs to `bench kernels moe`, not to {op}.")
    if op not in (KernelBench.MOE, KernelBench.FORMATS) and model is not None:
        raise BadSetting(f"--model belongs to `bench kernels moe` and `formats`, not to {op}.")
    if op is KernelBench.MOE:
        return moe.run(model or "gpt-oss-120b", tokens or moe.TOKENS, activations, weight_format)
    if op is KernelBench.DENSE:
        return dense.run(tokens or dense.TOKENS, formats=dense.formats(weight_format))
    if op is KernelBench.FORMATS:
        named = formats.FORMATS if weight_format is None else weight_format.split(",")
        return formats.run(model or formats.MODEL, tokens or formats.TOKENS, named)
    if op is KernelBench.SMALL:
        return small.run(tokens or small.TOKENS)
    if op is KernelBench.SAMPLING:
        return sampling.run(tokens=tokens or sampling.TOKENS)
    if tokens is not None:
        raise BadSetting("`bench kernels attention` has cases of its own; --tokens says nothing about them.")
    return attention.run()
