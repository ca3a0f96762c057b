"""The C modules by which Triton speaks to the driver, built before they are needed and without a GPU.

Triton builds one for itself and, up to version 3.6, one launcher for each signature: half a second of the C compiler
each. A machine that builds an image has no driver to link with. The modules name ``libcuda.so.1`` and find it when they
are loaded, so that an empty library of this name does for the linker.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

from triton import knobs
from triton.backends.nvidia import driver
from triton.backends.nvidia.driver import library_dirs
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src, platform_key
from triton.runtime.cache import get_cache_manager

LIBCUDA = "libcuda.so.1"
MAKES_LAUNCHERS = hasattr(driver, "make_launcher")
"""Whether this Triton builds a launcher for each signature."""


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
        # Where there is no driver the module is written and then cannot be loaded, which nobody needs here.
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
