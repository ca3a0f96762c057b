"""The records that everything here works on: one launch of a Triton kernel, and the kernel that it compiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from ptxproof.errors import Unsupported


@dataclass(frozen=True)
class TritonKernel:
    """One kernel as Triton compiles it. Equal kernels have the same machine code on the same SM."""

    name: str
    """Module and function."""
    specialisation: tuple[tuple[str, Any], ...]
    """Triton's type of each parameter and what it assumes of the value. A constant is ``("constexpr", value)``."""
    options: tuple[tuple[str, Any], ...]
    """Compile options, such as ``("num_warps", 4)``."""
    fn: Any
    """The jit function (Triton or Gluon)."""
    promise: str | None = None
    """A regular expression that must match in the PTX, such as the matrix instruction that the kernel relies on."""
    spills_because: str | None = None
    """Why this kernel may spill registers. Without a reason, a spill is a fault."""

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def signature(self) -> dict[str, str]:
        """Parameter → Triton's type."""
        return {param.name: kind for param, (kind, _) in zip(self.fn.params, self.specialisation, strict=True)}


class TritonLaunch(NamedTuple):
    """One launch: ``fn[grid](*arguments, **constants, **options)``."""

    fn: Any
    """The jit function (Triton or Gluon)."""
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    """The positional arguments: tensors and numbers."""
    constants: Mapping[str, Any]
    """Parameters by name, such as ``BLOCK``."""
    options: Mapping[str, Any]
    """Compile options: ``num_warps``, ``num_stages``, ``maxnreg`` …"""
    promise: str | None = None
    """See ``TritonKernel.promise``."""
    spills_because: str | None = None
    """See ``TritonKernel.spills_because``."""

    @classmethod
    def of(cls, fn: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> TritonLaunch:
        """The launch that ``fn[grid](*arguments, **named)`` starts. What is no parameter of ``fn`` is an option."""
        parameters = set(_signature(fn).parameters)
        constants = {name: value for name, value in named.items() if name in parameters}
        return cls(fn, grid, arguments, constants, {name: named[name] for name in named.keys() - constants.keys()})

    def kernel(self) -> TritonKernel:
        """What this launch compiles."""
        _, specialisation, options = _binder(self.fn)(*self.arguments, **self.constants, **self.options)
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        parts = tuple(specialisation), tuple(sorted(options.items()))
        return TritonKernel(name, *parts, self.fn, self.promise, self.spills_because)

    def runtime_arguments(self, kernel: TritonKernel) -> list[Any]:
        """The values that the compiled kernel takes as parameters: all but constants."""
        bound, _, _ = _binder(self.fn)(*self.arguments, **self.constants, **self.options)
        pairs = zip(bound.values(), kernel.specialisation, strict=True)
        return [value for value, (kind, _) in pairs if kind != "constexpr"]


def _signature(fn: Any) -> Any:
    if not isinstance(fn, JITFunction):
        name = getattr(fn, "__name__", None) or getattr(getattr(fn, "fn", fn), "__name__", "the argument")
        raise Unsupported(
            f"{name} is a {type(fn).__name__}, which cannot be compiled; pass a function with @triton.jit (of an "
            "autotuned kernel its .fn), and do not set TRITON_INTERPRET=1."
        )
    return fn.signature


@lru_cache(maxsize=256)
def _binder(fn: Any) -> Callable[..., tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]]:
    """Triton's own reading of a call: arguments, their specialisation, and the options that are left."""
    binder: Callable[..., tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]]
    binder = create_function_from_signature(_signature(fn), fn.params, BaseBackend)
    return binder
