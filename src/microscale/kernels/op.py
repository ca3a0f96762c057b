"""The contract between an op's implementations and the rest of Microscale.

An op is a folder: ``spec.py`` (what is asked), ``reference.py`` (what is true), ``cost.py`` (what it must move and
compute), and one module per implementation. An implementation says for itself whether it can run a spec on a GPU
(``supports``), what that costs (``cost``) and how it wants the weights laid out (``pack``). It starts kernels through
``launch``, which lists them for ``prove``. ``backends`` chooses among implementations and never looks inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Generic, TypeVar

import torch

from microscale.hardware import Gpu

SpecT = TypeVar("SpecT")
Reason = str
"""Why an implementation cannot run a spec: one clause that a user understands, with the numbers in it."""


class Unit(StrEnum):
    """Which arithmetic units do the work."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


class Activations(StrEnum):
    """The number format in which activations meet the weights."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    MXFP8 = "mxfp8"


def torch_dtype(activations: Activations) -> torch.dtype:
    """The type in which activations travel between ops; MXFP8 ones travel as bfloat16 and are quantised inside."""
    return torch.float32 if activations is Activations.FLOAT32 else torch.bfloat16


@dataclass(frozen=True)
class Cost:
    """The least that an implementation must move and compute, and how near to that it is expected to come."""

    bytes: int
    flops: int
    unit: Unit = Unit.BF16
    efficiency: float = 0.5
    """Fraction of the floor's speed expected where nothing was measured. Stated by the implementation, not fitted."""
    launches: int = 1
    """Kernels that run one after the other. Where nothing was measured, each adds ``hardware.LAUNCH_US``."""

    runs_as: str | None = None
    """The implementation that does the work, where this one hands it on: what was measured of that one holds."""

    def floor_us(self, gpu: Gpu) -> float:
        """The time in microseconds that no implementation of this cost can beat on ``gpu``."""
        peaks = {Unit.BF16: gpu.peak.bf16, Unit.FP8: gpu.peak.fp8, Unit.FP4: gpu.peak.fp4}
        tflops = peaks[self.unit] or gpu.peak.bf16
        return max(self.bytes / (gpu.bandwidth_gbs * 1e3), self.flops / (tflops * 1e6))

    def predicted_us(self, gpu: Gpu) -> float:
        return self.floor_us(gpu) / self.efficiency


class Implementation(ABC, Generic[SpecT]):
    """One way to run an op. Stateless: everything that it needs is in its arguments.

    Ops with weights also have ``pack(weights, spec) -> packed`` and ``run(packed, spec, gpu, x, …)``, ops without have
    ``run(spec, gpu, …)``; what stands for the dots differs from op to op.
    """

    op: ClassVar[str]
    name: ClassVar[str]
    layout: ClassVar[str]
    """Name of the physical layout that ``pack`` makes; implementations with the same layout share packed weights."""
    uncapturable: ClassVar[Reason | None] = "does not say that it can be captured"
    """Why no CUDA graph can hold ``run``: it reads what the device computed on the host, or copies from pageable host
    memory. ``None`` where it does neither, to which ``tests/kernels/test_capture.py`` holds it. Who forgets to say runs
    without a graph."""

    @abstractmethod
    def supports(self, spec: SpecT, gpu: Gpu) -> Reason | None:
        """``None`` when ``run`` works for this spec on this GPU, else why not. The one predicate that decides."""

    @abstractmethod
    def cost(self, spec: SpecT, gpu: Gpu) -> Cost:
        """What running the spec costs on this GPU."""

    def packed_bytes(self, spec: SpecT) -> int:
        """Bytes that the packed weights of one layer take; ops without weights take none."""
        return 0
