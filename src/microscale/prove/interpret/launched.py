"""Kernels that a CPU runs: inside ``interpreted`` every launch is compiled for another card and interpreted here."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from microscale.kernels.launch import Kernel, Launch, taken_by
from microscale.prove.compiler import compile_to_ptx
from microscale.prove.interpret.memory import GlobalMemory
from microscale.prove.interpret.run import Kernel as Interpreted

Edit = Callable[[Kernel, str], str]
"""Changes a kernel's PTX before it runs: how tests seed faults."""
Compile = Callable[[Kernel, int], tuple[str, int]]
"""A kernel and an SM → its PTX, and the bytes of shared memory that a block takes."""


@contextmanager
def interpreted(sm: int, edit: Edit | None = None, to_ptx: Compile | None = None) -> Iterator[dict[Kernel, int]]:
    """Inside, launches on CPU tensors run in the interpreter as they would on ``sm``. Gives the kernels that ran, and
    how often. ``to_ptx``: another compiler, or one that remembers."""
    compiled: dict[Kernel, Interpreted] = {}
    ran: dict[Kernel, int] = {}

    def take(started: Launch) -> bool:
        kernel = started.kernel()
        if kernel not in compiled:
            ptx, shared = (to_ptx or _ptx)(kernel, sm)
            compiled[kernel] = _read(ptx if edit is None else edit(kernel, ptx), shared)
        ran[kernel] = ran.get(kernel, 0) + 1
        _run(compiled[kernel], kernel, started)
        return False

    with taken_by(take):
        yield ran


@lru_cache(maxsize=64)
def _ptx(kernel: Kernel, sm: int) -> tuple[str, int]:
    return compile_to_ptx(kernel, sm)


@lru_cache(maxsize=32)
def _read(ptx: str, shared_bytes: int) -> Interpreted:
    """Reading PTX takes as long as running it over a small problem."""
    return Interpreted(ptx, shared_bytes)


def _run(program: Interpreted, kernel: Kernel, started: Launch) -> None:
    memory = GlobalMemory()
    given = [
        value for value, (kind, _) in zip(started.arguments, kernel.specialisation, strict=False) if kind != "constexpr"
    ]
    program.run(started.grid, [_bits(value, memory) for value in given], memory)


def _bits(value: Any, memory: GlobalMemory) -> int:
    """An argument as the kernel gets it: an address, or a number's bits."""
    if isinstance(value, Tensor):
        whole = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
        first = int(value.storage_offset())
        last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        end = first + last + 1 if value.numel() else first
        width = value.element_size()
        return memory.add(whole.numpy() if whole.numel() else np.empty(0, np.uint8), first * width, end * width)
    if isinstance(value, float):
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    return int(value)
