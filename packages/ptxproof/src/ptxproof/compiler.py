"""Compiles one kernel for one SM without a GPU, and reads from the result what the gate needs.

The options are the launch's own and nothing is added, because what is proved must be what is launched. Registers and
spills come from the log of the ptxas run that made the cubin; counting instructions with nvdisasm is no substitute, for
the one in the Triton 3.6 wheel prints nothing for SM 12.1, which reads as "no spills".
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import IO, Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.cache import triton_key

from ptxproof.launch import TritonKernel
from ptxproof.targets import FORBIDDEN_PTX, WARP_SIZE, matrix_instructions

FACTS_VERSION = 2
"""Part of every cache key: raise it when the meaning of a field of ``Facts`` changes."""


@dataclass(frozen=True)
class Facts:
    """What compiling a kernel showed. Only ``error`` and ``forbidden`` mean anything when it did not compile."""

    error: str | None = None
    """The line of the compiler's output that says what is wrong."""
    forbidden: tuple[str, ...] = ()
    mma: tuple[str, ...] = ()
    promise_found: bool = False
    shared: int | None = None
    tensor_memory: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    """Bytes of spill stores and spill loads together, as ptxas counts them."""

    def to_json(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, data: object) -> Facts:
        """Raises ``ValueError`` unless ``data`` has the shape that ``to_json`` gives."""
        if not isinstance(data, dict) or set(data) != {field.name for field in fields(cls)}:
            raise ValueError("not a record of facts")
        for name in ("forbidden", "mma"):
            if not (isinstance(data[name], list) and all(isinstance(item, str) for item in data[name])):
                raise ValueError(f"{name} is no list of strings")
        for name in ("shared", "tensor_memory", "registers", "spill_bytes"):
            if not (data[name] is None or type(data[name]) is int):
                raise ValueError(f"{name} is no number")
        if not (isinstance(data["promise_found"], bool) and isinstance(data["error"], str | None)):
            raise ValueError("promise_found or error has the wrong type")
        return cls(**{**data, "forbidden": tuple(data["forbidden"]), "mma": tuple(data["mma"])})


def warm_up(sm: int) -> None:
    """Compute once, before workers fork, what every compilation needs: hashes of Triton's own files, ptxas' version."""
    triton_key()
    make_backend(_target(sm)).hash()


def _target(sm: int) -> GPUTarget:
    return GPUTarget("cuda", sm, WARP_SIZE)


def cache_key(kernel: TritonKernel, sm: int) -> str:
    """Names all that the facts depend on: source with its callees, specialisation, options, SM and Triton."""
    parts = {
        "facts": FACTS_VERSION,
        "triton": triton.__version__,
        "sm": sm,
        "source": kernel.fn.cache_key,
        "specialisation": [(kind, _stable(value)) for kind, value in kernel.specialisation],
        "options": {name: _stable(value) for name, value in kernel.options},
        "promise": kernel.promise,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _stable(value: Any) -> str:
    """A text that is the same in every process: jit functions by their source, layouts and numbers by ``repr``."""
    return str(value.cache_key) if hasattr(value, "cache_key") else f"{type(value).__name__} {value!r}"


def source(kernel: TritonKernel, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
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


def compile_kernel(kernel: TritonKernel, sm: int, log: IO[bytes]) -> Facts:
    """Compile, and turn whatever the compiler does, short of killing the process, into facts.

    ``log`` is an empty file that takes what the compiler writes to the terminal, and outlives it if it is killed.
    """
    with captured(log) as written:
        try:
            with _own_folder(), knobs.nvidia.scope():
                knobs.nvidia.dump_ptxas_log = True
                made, options = source(kernel, _target(sm))
                compiled = triton.compile(made, target=_target(sm), options=options)
        except Exception as error:  # the compiler raises every kind, and each of them is the finding
            # Triton prints the PTX that ptxas refused, so what is forbidden is found there too.
            return Facts(error=reason(error, written()), forbidden=_forbidden(written()))
        return _facts(kernel, compiled, written())


def compile_to_ptx(kernel: TritonKernel, sm: int) -> tuple[str, int]:
    """The PTX for ``sm``, and the bytes of shared memory that a block takes. ptxas is not asked."""
    compiled = _compile(kernel, sm, lambda stages: {**stages, "cubin": _nothing})
    return compiled.asm["ptx"], compiled.metadata.shared


def compile_to_ir(kernel: TritonKernel, sm: int) -> str:
    """Triton's first intermediate code, without places in the source: kernels for which it is the same have the same
    PTX. It takes a fraction of the time."""
    first: list[str] = []

    def only_first(stages: dict[str, Any]) -> dict[str, Any]:
        first.append(next(iter(stages)))
        return {first[0]: stages[first[0]], "cubin": _no_shared_memory}

    text: str = _compile(kernel, sm, only_first).asm[first[0]]
    return re.sub(r"^#loc.*\n|\s*\bloc\((\"[^\"]*\"\()?(#loc\d*|unknown)\)*", "", text, flags=re.MULTILINE)


def _nothing(source: Any, metadata: Any) -> bytes:
    return b""


def _no_shared_memory(source: Any, metadata: dict[str, Any]) -> bytes:
    """Instead of all stages that are left out: what Triton asks for."""
    metadata.update(shared=0, name="")
    return b""


def _compile(kernel: TritonKernel, sm: int, choose: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """By the stages that are chosen from Triton's."""

    def inspect(*arguments: Any) -> tuple[str, str] | None:
        """Triton calls this without arguments for a part of its cache key, and then with the stages."""
        if not arguments:
            return "chosen", "chosen"
        stages = arguments[1]
        chosen = choose(dict(stages))
        stages.clear()
        stages.update(chosen)
        return None

    with _own_folder(), knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = inspect
        made, options = source(kernel, _target(sm))
        return triton.compile(made, target=_target(sm), options=options)


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Let Triton write to a folder that goes away.

    Its own cache would skip ptxas, and so the log, and grow by about 1 MB a kernel; and it leaves behind in the
    folder for temporary files whatever ptxas refused.
    """
    usual = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="ptxproof-") as folder, knobs.cache.scope():
        knobs.cache.dir = tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = usual


_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def _facts(kernel: TritonKernel, compiled: Any, log: str) -> Facts:
    ptx: str = compiled.asm["ptx"]
    registers = _REGISTERS.findall(log)
    spills = _SPILLS.findall(log)
    if not registers or not spills:
        return Facts(error="ptxas gave no count of registers and spills")
    return Facts(
        forbidden=_forbidden(ptx),
        mma=matrix_instructions(ptx),
        promise_found=kernel.promise is not None and re.search(kernel.promise, ptx) is not None,
        shared=compiled.metadata.shared,
        tensor_memory=compiled.metadata.tmem_size or 0,
        registers=max(map(int, registers)),
        spill_bytes=sum(int(stores) + int(loads) for stores, loads in spills),
    )


def _forbidden(text: str) -> tuple[str, ...]:
    return tuple(name for name in FORBIDDEN_PTX if name in text)


# ``ptxas x.ptx, line 9; error   : Feature … not supported``, ``kernel.py:7:3: error: …`` (MLIR), ``LLVM ERROR: …``
_COMPLAINTS = (
    re.compile(r"^ptxas[\w-]* .*?(?:error|fatal)\s*:\s*(\S.*)", re.MULTILINE),
    re.compile(r"(?:: error|LLVM ERROR): (\S.*)"),
)
_REPR = re.compile(r"\w+\((['\"])(.*)\1\)")


def reason(error: Exception, log: str) -> str:
    """Why a compilation failed, from what it raised and what it wrote."""
    if complaint := find_complaint(log):
        return complaint
    cause: BaseException = error
    while isinstance(cause, CompilationError) and cause.__cause__ is not None:
        cause = cause.__cause__
    # A CompilationError's text is an excerpt of the source and then the message, often the repr of an exception.
    message = (cause.error_message or "") if isinstance(cause, CompilationError) else str(cause)
    if wrapped := _REPR.fullmatch(message.strip()):
        message = wrapped[2]
    return next(iter(message.strip().splitlines()), type(cause).__name__)


def find_complaint(log: str) -> str | None:
    """The first line in which ptxas, MLIR or LLVM says what is wrong."""
    for pattern in _COMPLAINTS:
        if found := pattern.search(log):
            return found[1].strip()
    return None


@contextlib.contextmanager
def captured(log: IO[bytes]) -> Iterator[Callable[[], str]]:
    """Keep the compiler's output from the terminal; yields a function that gives all that it wrote so far.

    Triton prints in Python, MLIR and LLVM write to file descriptor 2.
    """
    printed = io.StringIO()
    saved = os.dup(2)
    os.dup2(log.fileno(), 2)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield lambda: printed.getvalue() + _read_log(log)
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def _read_log(log: IO[bytes]) -> str:
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode(errors="replace")
