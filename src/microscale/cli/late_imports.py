"""Modules that are imported when they are first used: ``explain`` plans, and starts no kernel.

They are the packages that compute (torch takes seconds to import, Triton 0.3) and our modules of kernels, where Triton
reads the source of each function again (0.3 s). All modules import them at their top, as everywhere. ``import_late``
puts a module in the place of each that brings the real one when somebody asks it for an attribute or a submodule.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

PACKAGES = ("torch", "triton", "numpy")
KERNELS = "microscale.kernels."
BINDING = f"{KERNELS}binding"
"""What our launches need of Triton."""


def import_late() -> None:
    """Have the packages that are not there yet, and all modules of kernels, imported on first use."""
    late = [name for name in PACKAGES if name not in sys.modules and _put_off(name)]
    sys.meta_path[:0] = [_Submodules(late), _Kernels()]


def is_loaded(package: str) -> bool:
    return not isinstance(sys.modules.get(package), LatePackage | None)


class LatePackage(ModuleType):
    """In a package's place until it is used; who imported it before then keeps it, and asks the package through it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_import_package(self.__name__), name)


def _put_off(name: str) -> bool:
    """Whether there is such a package; then something is in its place now."""
    found = find_spec(name)
    if found is None:
        return False
    late = LatePackage(name)
    late.__spec__, late.__file__ = found, found.origin
    late.__path__ = found.submodule_search_locations or []
    sys.modules[name] = late
    return True


def _import_package(name: str) -> ModuleType:
    if not is_loaded(name):
        sys.modules.pop(name, None)
    return import_module(name)


class _Submodules(MetaPathFinder):
    """Imports a package before one of its parts, which may then be there already: an extension does not start twice."""

    def __init__(self, packages: Sequence[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, part = name.partition(".")
        if not part or package not in self._packages or is_loaded(package):
            return None
        _import_package(package)
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


class LateKernels(ModuleType):
    """A module of ours that has not run yet. It stays the same module when it has."""

    late_loader: _Later

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "late_loader":
            # The import system asks for these while it makes the module.
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.late_loader.kernels.run(self)
        return getattr(self, name)


class _Kernels(MetaPathFinder):
    """Finds modules of kernels, and keeps them waiting. The first use of one runs all of them, in the order in which
    they were imported: what one of them sees to, such as stable keys, is then done before a kernel starts."""

    def __init__(self) -> None:
        self._waiting: list[LateKernels] = []

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith(KERNELS) or not (name.endswith("_jit") or name == BINDING):
            return None
        found = PathFinder.find_spec(name, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Later(found.loader, self)
        return found

    def wait(self, module: LateKernels) -> None:
        self._waiting.append(module)

    def run(self, wanted: LateKernels) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        waiting, self._waiting = self._waiting, []
        for module in (*waiting, wanted):
            # One that ran before it needed another, which has run by now.
            if isinstance(module, LateKernels):
                module.late_loader.run(module)


class _Later(Loader):
    """Loads a module of kernels when it is used."""

    def __init__(self, loader: Loader, kernels: _Kernels) -> None:
        self._loader = loader
        self.kernels = kernels

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return LateKernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert isinstance(module, LateKernels)
        module.late_loader = self
        self.kernels.wait(module)

    def run(self, module: ModuleType) -> None:
        module.__class__ = ModuleType
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        del module.__dict__["late_loader"]
        self._loader.exec_module(module)
