"""What Triton compiles for a kernel on an SM, under which key its cache keeps the result, and what a launch also loads.

Source and key are those of the launch itself: the specialisation is the launch's, and Triton's own ``_pack_args`` turns
it into a source and options. So a launch finds what was compiled ahead; ``tests/kernels/compiling`` compares the two.

A launch also loads C modules by which Triton calls the driver. Triton builds one for itself and, up to version 3.6, one
launcher for each signature: half a second of the C compiler each. They are built ahead too, also without a GPU. A
machine that builds an image has no driver to link with; the modules name ``libcuda.so.1`` and load it at run time, so
an empty library of this name is enough for the linker.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.backends.nvidia.driver import library_dirs
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.build import compile_module_from_src, platform_key
from triton.runtime.cache import get_cache_key, get_cache_manager, triton_key

from microscale.kernels.launch import Kernel

LIBCUDA = "libcuda.so.1"
MAKES_LAUNCHERS = hasattr(driver, "make_launcher")
"""Whether this Triton builds a launcher for each signature."""


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


def shared_modules() -> dict[str, str]:
    """Name → C source of what every launch loads."""
    return {"cuda_utils": Path(driver.dirname, "driver.c").read_text()}


def modules(made: ASTSource) -> dict[str, str]:
    """Name → C source of what the launch of one kernel loads. A kernel that takes a tensor descriptor, of which we have
    none, gets its launcher when it is loaded."""
    if not MAKES_LAUNCHERS or any(str(kind).startswith("tensordesc") for kind in made.signature.values()):
        return {}
    return {"__triton_launcher": driver.make_launcher(dict(made.constants), dict(made.signature), None)}


def is_built(name: str, code: str) -> bool:
    """Whether the cache has the module."""
    key = hashlib.sha256((code + platform_key()).encode()).hexdigest()
    return get_cache_manager(key).get_file(f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}") is not None


def build(wanted: dict[str, str]) -> None:
    """Put modules into the cache that are not there."""
    for name, code in wanted.items():
        if not is_built(name, code):
            _build(name, code)


def _build(name: str, code: str) -> None:
    with contextlib.ExitStack() as stack:
        try:
            folders = library_dirs()
        except (AssertionError, OSError, subprocess.CalledProcessError):  # there is no driver here
            stub = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="microscale-libcuda-")))
            _empty_library(stub)
            folders = [driver.libdevice_dir, str(stub)]
        # Where there is no driver the module is written and then cannot be loaded, which does not matter here.
        with contextlib.suppress(ImportError):
            compile_module_from_src(
                src=code,
                name=name,
                library_dirs=folders,
                include_dirs=driver.include_dirs,
                libraries=driver.libraries,
                # Some linkers leave out a library of which nothing is used, as of an empty one.
                ccflags=["-Wl,--no-as-needed", f"-l:{LIBCUDA}"],
            )


def _empty_library(folder: Path) -> None:
    compiler = knobs.build.cc or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("there is no C compiler here; install gcc, or name one in CC")
    command = [compiler, "-shared", "-x", "c", "/dev/null", "-o", str(folder / LIBCUDA), f"-Wl,-soname,{LIBCUDA}"]
    subprocess.run(command, check=True, capture_output=True)
