"""Executes jit functions of a Gluon module as plain Python over NumPy: addresses, masks and loops, without layouts.

Matrix instructions and inline assembly are not executed: the test names the functions that it replaces. A read outside
of the memory that a pointer belongs to fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from triton.language import constexpr
from triton.runtime.jit import JITFunction


class Values(np.ndarray):
    """A tensor without layout. Integers are as wide as they need be."""

    def to(self, dtype: object) -> Values:
        return self


class Pointer:
    """Addresses within one buffer."""

    def __init__(self, memory: npt.NDArray[Any], at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)


def _values(array: Any) -> Values:
    return np.asarray(array).view(Values)


def _load(pointer: Pointer, mask: Any = True, other: Any = 0, eviction_policy: str = "") -> Values:
    at, wanted = np.broadcast_arrays(np.asarray(pointer.at), np.asarray(mask))
    inside = (at >= 0) & (at < len(pointer.memory))
    assert inside[wanted].all(), "a read outside of the tensor"
    return _values(np.where(wanted, pointer.memory[np.where(inside, at, 0)], other))


def _nothing(*args: object, **kwargs: object) -> None:
    """A layout, a barrier, a hint."""


LANGUAGE = SimpleNamespace(
    arange=lambda first, end, layout=None: _values(np.arange(first, end)),
    zeros=lambda shape, dtype, layout=None: _values(np.zeros(shape, np.int64)),
    cdiv=lambda a, b: -(-a // b),
    minimum=np.minimum,
    maximum=np.maximum,
    load=_load,
    static_range=range,
    SliceLayout=_nothing,
    BlockedLayout=_nothing,
    DotOperandLayout=_nothing,
    int32=None,
    int64=None,
    float32=None,
)


def plain(module: ModuleType, name: str, replaced: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The jit function ``name`` of ``module``, and all that it calls there, as Python functions."""
    env = {**vars(module), "gl": LANGUAGE, "range": range}
    for key, value in list(env.items()):
        if isinstance(value, JITFunction) and value.fn.__module__ == module.__name__:
            env[key] = FunctionType(value.fn.__code__, env, key, value.fn.__defaults__)
        elif isinstance(value, constexpr):
            env[key] = value.value
        elif callable(value) and getattr(value, "__module__", "").startswith(("microscale.", "triton.")):
            env[key] = _nothing  # layouts, waits and hints
    env.update(replaced)
    found: Callable[..., Any] = env[name]
    return found
