"""torch when it is first used: importing it takes seconds, and ``explain`` needs none of it.

Modules import torch at their top, as everywhere. ``import_late`` puts a module in its place that brings the real one
when somebody asks it for an attribute or imports a submodule.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

TORCH = "torch"


class LateTorch(ModuleType):
    """In torch's place until it is used; who imported it before then keeps it, and asks torch through it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_torch(), name)


def import_late() -> None:
    """Have torch imported on first use, unless it is there already."""
    found = None if TORCH in sys.modules else find_spec(TORCH)
    if found is None:
        return
    late = LateTorch(TORCH)
    late.__spec__, late.__file__ = found, found.origin
    late.__path__ = found.submodule_search_locations or []
    sys.modules[TORCH] = late
    sys.meta_path.insert(0, _Submodules())


def is_loaded() -> bool:
    return not isinstance(sys.modules.get(TORCH), LateTorch | None)


def _torch() -> ModuleType:
    if isinstance(sys.modules.get(TORCH), LateTorch):
        del sys.modules[TORCH]
    return import_module(TORCH)


class _Submodules(MetaPathFinder):
    """Imports torch before one of its parts, which may then be there already: an extension does not start twice."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(f"{TORCH}.") or is_loaded():
            return None
        _torch()
        # While it is among the modules, the import would go by its own spec, and run it again.
        known = sys.modules.pop(name, None)
        return None if known is None else ModuleSpec(name, _Known(known))


class _Known(Loader):
    """Gives a module that was imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._spec = module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It ran, by a spec of its own."""
        module.__spec__ = self._spec
