"""The contract between an op's implementations and the rest of Microscale.

An op is a folder: ``spec.py`` (what is asked), ``reference.py`` (what is true), ``cost.py`` (what it must move and
compute), and one module per implementation. An implementation says for itself whether it can run a spec on a GPU
(``supports``), what that costs (``cost``) and how it wants the weights laid out (``pack``). Where it has several ways
to run, each is a named ``Path`` that says for which specs it is meant. It starts kernels through ``launch``, which
lists them for ``prove``. ``planning`` chooses among implementations and among their paths, and never looks inside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

import torch

from microscale.hardware import Gpu
from microscale.hardware.triton_faults import TritonForm

SpecT = TypeVar("SpecT")
PackedT = TypeVar("PackedT")
Reason = str
"""Why an implementation or a path does not run a spec: one clause that a user understands, with the numbers in it."""


class MatrixUnit(StrEnum):
    """Which arithmetic units do the work."""

    BF16 = "bf16"
    FP8 = "fp8"
    FP4 = "fp4"


class Activations(StrEnum):
    """The number format in which activations meet the weights."""

    FLOAT32 = "float32"
    BF16 = "bf16"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"

    @property
    def narrow(self) -> bool:
        """Quantised on their way into the matrix unit."""
        return self in (Activations.MXFP8, Activations.NVFP4)

    @property
    def itemsize(self) -> int:
        """Bytes of one number as it travels between ops."""
        return 4 if self is Activations.FLOAT32 else 2


def torch_dtype(activations: Activations) -> torch.dtype:
    """The type in which activations travel between ops; narrow ones travel as bfloat16 and are quantised inside."""
    return torch.float32 if activations is Activations.FLOAT32 else torch.bfloat16


@dataclass(frozen=True)
class Cost:
    """The least that an implementation must move and compute, and how near to that it is expected to come."""

    bytes: int
    flops: int
    unit: MatrixUnit = MatrixUnit.BF16
    efficiency: float = 0.5
    """Fraction of the floor's speed expected where nothing was measured. Stated by the implementation, not fitted."""
    launches: int = 1
    """Kernels that run one after the other. Where nothing was measured, each adds ``hardware.LAUNCH_US``."""
    chained: bool = True
    """Whether they take part in programmatic launches where the card has them. A library's do not, which the oracle
    charges with ``hardware.UNCHAINED_US``."""

    runs_as: str | None = None
    """The implementation that does the work, where this one hands it on: what was measured of that one holds."""


@dataclass(frozen=True)
class Path(Generic[SpecT]):
    """One way in which an implementation runs a spec: one chain of launches. Each op adds ``start``, which does it.

    An implementation lists its paths in the order in which they are asked. The first that supports a spec runs it.
    Only the oracle asks, so that every choice is kept with its reasons.
    """

    name: str
    first_because: Reason
    """Why it goes before the paths behind it, where those could run the spec too."""
    supports: Callable[[SpecT, Gpu], Reason | None]
    """``None`` when this path is meant for the spec on this GPU, else why not."""
    timed_as: str | None = field(default=None, kw_only=True)
    """The path under whose name it is measured too, where the two differ by little."""
    uses: frozenset[TritonForm] = field(default=frozenset(), kw_only=True)
    """What its kernels leave to Triton's compiler; a version that is wrong there may not run it."""


def always(spec: object, gpu: Gpu) -> None:
    """``supports`` of a path that runs whatever its implementation does."""


class Implementation(ABC, Generic[SpecT]):
    """One implementation of an op. Stateless: everything that it needs is in its arguments.

    The base class of each op, next to its spec, says what ``pack`` and ``run`` take. ``run`` gets the path that the
    oracle picked and does exactly that.
    """

    op: ClassVar[str]
    name: ClassVar[str]
    layout: ClassVar[str]
    """Name of the physical layout that ``pack`` makes; implementations with the same layout share packed weights."""
    paths: tuple[Path[Any], ...] = ()
    """The ways of ``run``, first to last; none where there is one way and nothing to choose."""
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
