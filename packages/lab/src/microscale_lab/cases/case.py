"""What a case is: one call of one op's real code, what the float32 reference says, and how far apart they may be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from microscale.hardware import Gpu
from microscale.kernels.op import Implementation, Path, Reason
from microscale.planning.paths import PathList, ask, path_of
from microscale_lab.cases.errors import Errors, errors

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Compared:
    """One part of an answer: its distance from the reference, and the most that its formats allow."""

    what: str
    found: Errors
    allowed: Errors

    @property
    def fault(self) -> str | None:
        """What is wrong, with the numbers; ``None`` when both norms are within their bounds. NaN is not."""
        if self.found.worst <= self.allowed.worst and self.found.rms <= self.allowed.rms:
            return None
        return (
            f"{self.what}: the worst error is {self.found.worst:.3e} (allowed {self.allowed.worst:.3e}), the RMS error "
            f"{self.found.rms:.3e} (allowed {self.allowed.rms:.3e}), relative to the reference's RMS"
        )


def compare(what: str, actual: Tensor, expected: Tensor, allowed: Errors) -> Compared:
    """A tensor of another shape is as wrong as can be."""
    if actual.shape != expected.shape:
        shapes = f"{tuple(actual.shape)} instead of {tuple(expected.shape)}"
        return Compared(f"{what} of shape {shapes}", Errors(torch.inf, torch.inf), allowed)
    return Compared(what, errors(actual, expected), allowed)


def same(what: str, actual: Tensor, expected: Tensor) -> Compared:
    """The same numbers, NaN for NaN: the error is the share of those that differ."""
    if actual.shape != expected.shape:
        return compare(what, actual, expected, Errors(0.0, 0.0))
    expected = expected.to(actual.device)
    differ = (actual != expected) & ~(actual.isnan() & expected.isnan())
    share = float(differ.double().mean()) if differ.numel() else 0.0
    return Compared(what, Errors(share, share**0.5), Errors(0.0, 0.0))


def hold(compared: Iterable[Compared]) -> None:
    """For tests: every part within its bounds."""
    faults = [part.fault for part in compared if part.fault is not None]
    if faults:
        raise AssertionError("; ".join(faults))


Finish = Callable[[], Iterator[Compared]]
"""Computes the reference and compares what the kernels have written by then."""


@dataclass(frozen=True)
class KernelCase(ABC):
    """One call of an op, small enough for a CPU that interprets PTX unless it says otherwise."""

    name: str
    large: bool = field(default=False, kw_only=True)
    """Too much for a CPU: runs on a GPU alone."""

    op: ClassVar[str]
    """The op's name in the registry."""

    @abstractmethod
    def variant(self, gpu: Gpu) -> str:
        """Implementation and path that run it on this card, as the oracle names them."""

    @abstractmethod
    def refuses(self, gpu: Gpu) -> Reason | None:
        """Why the card has no such case; ``None`` where it does."""

    @abstractmethod
    def start(self, gpu: Gpu, device: str) -> Finish:
        """Make the inputs on ``device`` and run the op's own code for ``gpu``: all launches are in here."""


_note: ContextVar[Callable[[Tensor], None] | None] = ContextVar("_note", default=None)


def just_written(*tensors: Tensor | None) -> None:
    """In a model these come from the launch before the first of the case, which may still run: a kernel launched as
    a dependent of it must wait before it reads them. Weights, positions, page tables and older keys are there."""
    note = _note.get()
    if note is not None:
        for x in tensors:
            if x is not None:
                note(x)


@contextmanager
def just_written_noted(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Inside, ``note`` gets what cases say is ``just_written``."""
    token = _note.set(note)
    try:
        yield
    finally:
        _note.reset(token)


def picked(entry: Implementation[Any], form: str, path: Path[Any] | None) -> str:
    """The name of a variant: ``triton_w4a16, small batch, direct``."""
    return ", ".join(part for part in (entry.name, form, path.name if path else "") if part)


def refusal(entry: Implementation[Any], form: PathList, spec: Any, gpu: Gpu) -> Reason | None:
    """Why the implementation, or each of its paths for this form, does not run the spec on the card."""
    return entry.supports(spec, gpu) or ask(entry, form, spec, gpu).refusal


class OracleCase(KernelCase):
    """A case that runs as the oracle decides: by the path that it picks for this implementation and spec."""

    form: ClassVar[PathList] = PathList.RUN

    if TYPE_CHECKING:

        @property
        def entry(self) -> Any: ...

        @property
        def spec(self) -> Any:
            """Sizes of layer and batch, without tensors."""

    def label(self) -> str:
        """The part of the variant's name that is not the path."""
        return ""

    def path(self, gpu: Gpu) -> Any:
        return path_of(self.entry, self.form, self.spec, gpu)

    def variant(self, gpu: Gpu) -> str:
        return picked(self.entry, self.label(), ask(self.entry, self.form, self.spec, gpu).path)

    def refuses(self, gpu: Gpu) -> Reason | None:
        return refusal(self.entry, self.form, self.spec, gpu)
