"""Triton's interpreter without its waste: a pytest plugin for the processes that ``support.interpreter`` starts.

Triton replaces the functions of ``triton.language`` for as long as a grid runs, and does so again at every call of a
device function, although they are replaced already. It computes for every sum of integers whether it overflows, and
throws the answer away unless it debugs. Both together were three quarters of the time of our attention cases. What
kernels compute is the same without them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
from triton import language as tl
from triton.runtime import interpreter

_usual = interpreter._patch_lang
_replaced: set[ModuleType] = set()
"""Modules whose functions are the interpreter's now, until the grid that runs has ended."""


class _Scope(interpreter._LangPatchScope):  # type: ignore[misc]
    """What was there before. Ends with its grid."""

    def restore(self) -> None:
        super().restore()
        _replaced.clear()


@cache
def _modules(globals_of: FunctionType) -> frozenset[ModuleType]:
    """The parts of the language that a function sees."""
    return frozenset(value for value in globals_of.__globals__.values() if value is tl or value is tl.core)


def _replace_once(function: FunctionType) -> Any:
    modules = _modules(function)
    scope = _Scope()
    if not modules <= _replaced:
        scope._changes = _usual(function)._changes
        _replaced.update(modules)
    return scope


_of_scalars = cache(interpreter._get_np_dtype)
_ADDRESS = np.dtype(np.uint64)


def _numpy_type(kind: Any) -> np.dtype[Any]:
    """Triton's own builds a table of all types at every call."""
    scalar = kind.element_ty if isinstance(kind, tl.block_type) else kind
    return _ADDRESS if isinstance(scalar, tl.pointer_type) else _of_scalars(scalar)


interpreter._patch_lang = _replace_once
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter._get_np_dtype = _numpy_type


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--first-of-each", help="1/3: the first case of each test function, of a third of the functions.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("--first-of-each"):
        usual = [item for item in items if item.get_closest_marker("nightly") is None]
        first = list({item.nodeid.partition("[")[0]: item for item in reversed(usual)}.values())[::-1]
        place, parts = map(int, part.split("/"))
        items[:] = first[place - 1 :: parts]
