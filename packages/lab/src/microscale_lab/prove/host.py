"""Which Python code of ours runs when a case packs its weights and launches its kernels: what ``prove --mutate --host``
changes.

References, costs and decisions are not in it: cases use them to know what is right, and which path runs.
"""

from __future__ import annotations

import functools
import gc
import sys
from types import CodeType, FrameType, FunctionType
from typing import Any

from microscale_lab.prove.selection import CaseOnCard, rehearse
from ptxproof.mutate import HostFunction

OURS = "microscale.kernels."
FORGETFUL = ("microscale.", "microscale_lab.cases.")
NOT_OURS = ("reference", "cost", "spec", "paths", "launch", "op")
"""Modules that pack and launch nothing."""


def called(unit: CaseOnCard) -> set[HostFunction]:
    """Functions and methods of kernels that the case calls."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith(OURS) and module.rpartition(".")[2] not in NOT_OURS:
            codes.add(frame.f_code)

    forget()
    sys.setprofile(note)
    try:
        rehearse(unit.case, unit.gpu)
    finally:
        sys.setprofile(None)
    return {found for code in codes if (found := _by_code().get(code)) is not None}


def forget() -> None:
    """Empty all caches of functions of ours: what was packed before is packed again."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper and each.__module__.startswith(FORGETFUL):
            each.cache_clear()


_FOUND: dict[CodeType, HostFunction] = {}


def _by_code() -> dict[CodeType, HostFunction]:
    """Functions of the modules by their code, those with variables of an enclosing function left out."""
    return _FOUND or _find()


def _find() -> dict[CodeType, HostFunction]:
    for name, module in list(sys.modules.items()):
        if name.startswith(OURS):
            for value in list(vars(module).values()):
                for each in (value, *vars(value).values()) if isinstance(value, type) else (value,):
                    fn = getattr(getattr(each, "fget", None) or each, "__wrapped__", each)
                    own = isinstance(fn, FunctionType) and fn.__code__.co_filename == module.__file__
                    if own and not fn.__closure__:
                        _FOUND.setdefault(fn.__code__, HostFunction(fn))
    return _FOUND
