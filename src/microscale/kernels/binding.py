"""What a launch needs of Triton itself: its reading of a call, whether it interprets, stable keys, and a short way to
start what was started before.

``explain`` imports this module and those of kernels on first use (``cli/late_imports.py``), so who needs a name of it
asks the module: ``binding.PLAIN``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from microscale.errors import Unsupported
from microscale.kernels.keys import make_keys_stable

make_keys_stable()
PLAIN = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, which knows neither assembly nor scaled products. It is settled when
they are imported; asking Triton at every launch reads the environment each time."""

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


def start(
    fn: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Start a kernel. The first time Triton does; a kernel that it started before is given to the driver at once.

    Triton spells out constants and options at every launch, reads its settings from the environment, and calls hooks
    that nobody set. What decides is kept: its reading of the arguments. Our table is in its own one, under keys that
    it does not use, so whoever makes it forget a kernel makes us forget it.
    """
    runtime = knobs.runtime
    if PLAIN or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
        fn.run(*arguments, grid=grid, warmup=False, **constants, **options)
        return
    device = driver.active.get_current_device()
    kernels = fn.device_caches[device][0]
    read = _READERS.get((id(fn), len(arguments))) or _reader(fn, len(arguments))
    key = (*read(*arguments)[1], *constants.items(), *options.items())
    known = kernels.get(key)
    if known is None:
        kernel = fn.run(*arguments, grid=grid, warmup=False, **constants, **options)
        bound, _, _ = binder(fn)(*arguments, **constants, **options)
        kernels[key] = kernel, tuple(bound.values())[len(arguments) :]
        return
    kernel, rest = known
    across, down, deep = (*grid, 1, 1)[:3]
    stream = driver.active.get_current_stream(device)
    kernel.run(across, down, deep, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments, *rest)


def _reader(fn: Any, count: int) -> _Binder:
    """Triton's own reading of the first ``count`` arguments."""
    first = inspect.Signature(list(fn.signature.parameters.values())[:count])
    return _READERS.setdefault((id(fn), count), create_function_from_signature(first, fn.params[:count], BaseBackend))
