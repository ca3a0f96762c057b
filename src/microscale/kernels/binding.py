"""What a launch needs of Triton itself: its reading of a call, whether it interprets, and stable keys.

``explain`` imports this module and those of kernels on first use (``cli/late_imports.py``), so who needs a name of it
asks the module: ``binding.PLAIN``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from microscale.errors import Unsupported
from microscale.kernels.keys import make_keys_stable

make_keys_stable()
PLAIN = bool(triton.knobs.runtime.interpret)
"""Whether the kernels run in Triton's interpreter, which knows neither assembly nor scaled products. It is settled when
they are imported; asking Triton at every launch reads the environment each time."""

_Binder = Callable[..., tuple[dict[str, Any], list[tuple[str, Any]], dict[str, Any]]]
_BINDERS: dict[int, _Binder] = {}


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
