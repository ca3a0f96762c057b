"""Runs launches on a CPU: each is compiled for an SM, and its PTX is interpreted over the tensors' memory."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from ptxproof.compiler import compile_to_ptx
from ptxproof.interpreter.dependent import Chain, byte_range, storage_bytes
from ptxproof.interpreter.memory import GlobalMemory
from ptxproof.interpreter.run import InterpretedKernel
from ptxproof.launch import TritonKernel, TritonLaunch

Edit = Callable[[TritonKernel, str], str]
"""Changes a kernel's PTX before it runs. Tests seed faults with it."""
Compile = Callable[[TritonKernel, int], tuple[str, int]]
"""A kernel and an SM → its PTX, and the bytes of shared memory that a block takes."""


def interpret(
    launch: TritonLaunch, sm: int, edit: Edit | None = None, to_ptx: Compile | None = None,
    chain: Chain | None = None, resident: int | None = None,
) -> TritonKernel:  # fmt: skip
    """Run one launch on CPU tensors as it would run on ``sm``, and write its results into them.

    Raises ``InterpretError`` where the kernel does something that no kernel may do. ``to_ptx`` replaces the compiler,
    for example by one with a cache. ``chain`` has the launches before, and gets this one: with it a launch with
    ``launch_pdl=True`` must wait before it touches what they write. ``resident``: how many programs the card runs at
    once, all by default; it counts where programs wait for each other. Returns the kernel that ran.
    """
    kernel = launch.kernel()
    ptx, shared = (to_ptx or _ptx)(kernel, sm)
    program = _read(ptx if edit is None else edit(kernel, ptx), shared)
    memory = GlobalMemory()
    arguments = [_bits(value, memory) for value in launch.runtime_arguments(kernel)]
    dependent = bool(launch.options.get("launch_pdl"))
    program.run(launch.grid, arguments, memory, chain, dependent=dependent, resident=resident)
    return kernel


def interpret_ptx(ptx: str, grid: tuple[int, ...], arguments: Sequence[Any], shared_bytes: int = 0) -> None:
    """Run the kernel of ``ptx`` over CPU tensors and numbers. ``shared_bytes``: dynamic shared memory of a block."""
    memory = GlobalMemory()
    _read(ptx, shared_bytes).run(grid, [_bits(value, memory) for value in arguments], memory)


@lru_cache(maxsize=64)
def _ptx(kernel: TritonKernel, sm: int) -> tuple[str, int]:
    return compile_to_ptx(kernel, sm)


@lru_cache(maxsize=64)
def _read(ptx: str, shared_bytes: int) -> InterpretedKernel:
    """Reading PTX takes as long as running it over a small problem."""
    return InterpretedKernel(ptx, shared_bytes)


def _bits(value: Any, memory: GlobalMemory) -> int:
    """An argument as the kernel gets it: an address, or a number's bits."""
    if isinstance(value, Tensor):
        return memory.add(storage_bytes(value), *byte_range(value))
    if isinstance(value, float):
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value)
