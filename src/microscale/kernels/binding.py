"""What a launch needs of Triton itself: its reading of a call, whether it interprets, stable keys, and a short way to
start what was started before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime import driver
from triton.runtime.jit import DependenciesFinder, JITFunction, create_function_from_signature

from microscale.errors import Unsupported

if hasattr(knobs.language, "fp_fusion_enabled"):  # Triton 3.9, which warns in every process that leaves this unset
    knobs.language.default_fp_fusion = knobs.language.default_fp_fusion
STABLE = ("microscale.", "triton.")
"""Functions whose keys are made stable, by the beginning of their names. vLLM's process has others."""
_update_hash = DependenciesFinder._update_hash


def _add_callee(finder: Any, callee: Any) -> None:
    """Makes the key of a compiled kernel the same in every process.

    Triton hashes a function with the keys of those that it calls, and adds the constants that they use *if their keys
    were asked for before*. So the key depends on which kernel a process came to first, and one process does not find
    what another compiled: 25 of gpt-oss-20b's 68 kernels were compiled again after they had been asked for in another
    order (Triton 3.6.0 and 3.7.1). A callee's key includes its constants, so nothing else is added for our functions.
    A launch, which looks at each constant that was added, then has fewer to look at.
    """
    if finder.name.startswith(STABLE):
        finder.hasher.update(f"{callee.cache_key}{getattr(callee, 'noinline', False)}".encode())
    else:
        _update_hash(finder, callee)


DependenciesFinder._update_hash = _add_callee  # before the first key is asked for
PLAIN = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, which has neither assembly nor scaled products. Read once: Triton
reads the environment each time."""

_Binder = Callable[..., tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]]
_BINDERS: dict[int, _Binder] = {}
_READERS: dict[tuple[int, int], _Binder] = {}
"""As ``_BINDERS``, of a function's first parameters alone, by their number."""


def binder(fn: Any) -> _Binder:
    """Triton's own reading of a call: arguments, their specialisation, and the options that are left.

    It asks the backend how to specialise, and for NVIDIA GPUs that is the base class's way.
    """
    found = _BINDERS.get(id(fn))
    if found is None:
        if not isinstance(fn, JITFunction):
            raise Unsupported(
                f"{getattr(fn, '__name__', fn)} is a {type(fn).__name__}, which cannot be compiled; kernels are listed "
                "where they were loaded without TRITON_INTERPRET=1."
            )
        found = _BINDERS[id(fn)] = create_function_from_signature(fn.signature, fn.params, BaseBackend)
    return found


class Kept(NamedTuple):
    """A kernel that Triton started once, on one device."""

    kernel: Any
    device: int
    rest: tuple[Any, ...]
    """What the driver gets after a launch's arguments: constants, defaults among them."""

    def start(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """As Triton does without listeners: no record for hooks, and no hooks."""
        kernel = self.kernel
        across, down, deep = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(self.device)
        own = kernel.function, kernel.packed_metadata, None, None, None
        kernel.run(across, down, deep, stream, *own, *arguments, *self.rest)


def place_of(
    fn: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[Any, Any], tuple[Any, ...]]:
    """The table that has the ``Kept`` of a launch, and its key there.

    At every launch Triton spells out constants and options as text, reads settings from the environment, and calls
    hooks that are not set. What decides is in the key: its own reading of the arguments. The table is Triton's, with
    keys that it does not use itself, so whoever makes it forget a kernel makes us forget it. It is an empty one for
    interpreted functions, and where somebody does listen to Triton's launches.
    """
    runtime = knobs.runtime
    if not isinstance(fn, JITFunction) or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        return {}, ()
    read = _READERS.get((id(fn), len(arguments))) or _reader(fn, len(arguments))
    key = (*read(*arguments)[1], *constants.items(), *options.items())
    return fn.device_caches[driver.active.get_current_device()][0], key


def keep(place: tuple[dict[Any, Any], tuple[Any, ...]], kernel: Any, launched: tuple[Any, ...]) -> None:
    """``kernel``: what Triton started for ``launched``, which are function, arguments, constants and options."""
    if kernel is not None:  # an interpreter has none
        fn, arguments, constants, options = launched
        bound, _, _ = binder(fn)(*arguments, **constants, **options)
        table, key = place
        table[key] = Kept(kernel, driver.active.get_current_device(), tuple(bound.values())[len(arguments) :])


def _reader(fn: Any, count: int) -> _Binder:
    """Triton's own reading of the first ``count`` arguments."""
    first = inspect.Signature(list(fn.signature.parameters.values())[:count])
    return _READERS.setdefault((id(fn), count), create_function_from_signature(first, fn.params[:count], BaseBackend))
