"""What Triton compiles for a kernel on an SM, and under which key its cache keeps the result.

Both come out as they do in the launch itself: the specialisation is the launch's, and Triton's own ``_pack_args`` turns
it into a source and options. So a launch finds what was compiled ahead: ``tests/compiling`` holds the two together.
"""

from __future__ import annotations

import hashlib
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import get_cache_key, triton_key

from microscale.kernels.launch import Kernel


def source(kernel: Kernel, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
    """The source and options that a launch would compile; refuses what the launch would refuse."""
    fn, backend = kernel.fn, make_backend(target)
    options = dict(kernel.options)
    # As ``JITFunction.run`` has them.
    given = {"debug": fn.debug or knobs.runtime.debug, "instrumentation_mode": knobs.compilation.instrumentation_mode}
    if unknown := sorted(set(options) - set(vars(backend.parse_options({})))):
        raise ValueError(f"the kernel has no argument or compile option {', '.join(map(repr, unknown))}")
    bound = {param.name: value for param, (_, value) in zip(fn.params, kernel.specialisation, strict=True)}
    parsed, signature, constants, attributes = fn._pack_args(
        backend, given | options, bound, list(kernel.specialisation), options
    )
    make = GluonASTSource if fn.is_gluon() else ASTSource
    return make(fn, signature, constants, attributes), dict(vars(parsed))


def hash_compiler(target: GPUTarget) -> None:
    """What all keys share, once in a process: hashes of Triton's library and files, the version of ptxas."""
    triton_key()
    make_backend(target).hash()


def cache_hash(kernel: Kernel, target: GPUTarget) -> str:
    """The name under which Triton's cache keeps the kernel: it hashes Triton's library, the source with all that it
    calls, types and constants, options, the SM, ptxas, and the variables that change what is compiled."""
    made, options = source(kernel, target)
    backend = make_backend(target)
    parsed = backend.parse_options(options | made.parse_options())
    key = get_cache_key(made, backend, parsed, env_vars=get_cache_invalidating_env_vars())
    return hashlib.sha256(key.encode()).hexdigest()
