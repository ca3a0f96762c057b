"""Runs hand-written PTX on the GPU at hand: ptxas makes the machine code, the driver loads and starts it."""

from __future__ import annotations

import ctypes
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton.backends.nvidia.compiler import get_ptxas

from ptx_kernels import SHARED, Words
from ptxproof import present_card
from ptxproof.instructions import target_name


def runs_code_for(sm: int, here: int) -> bool:
    """Whether PTX of one SM can be assembled for another: an SM's own stays there, all else runs on later ones."""
    return sm == here or (sm < here and not target_name(sm).endswith("a"))


def assemble(ptx: str, sm: int) -> bytes:
    """Machine code for ``sm``; raises ``ValueError`` with what ptxas says."""
    text = re.sub(r"^\.target \S+", f".target {target_name(sm)}", ptx, count=1, flags=re.MULTILINE)
    with tempfile.TemporaryDirectory(prefix="ptxproof-") as folder:
        source, result = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        command = [get_ptxas(sm).path, f"--gpu-name={target_name(sm)}", str(source), "-o", str(result)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(done.stderr + done.stdout)
        return result.read_bytes()


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    return library


def _check(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"CUDA says {(text.value or b'?').decode()} ({status})")


@cache
def _loaded(ptx: str) -> ctypes.c_void_p:
    """The kernel of this PTX. Stays loaded, as its module does."""
    cubin = assemble(ptx, _present_sm())
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin))
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, b"kernel"))
    return function


def _present_sm() -> int:
    card = present_card()
    assert card is not None
    return card.sm


def run_on_gpu(ptx: str, words: Words, num_out: int) -> Words:
    """As ``ptx_kernels.run_warp``: ``words [32, inputs]`` → ``[32, outputs]``."""
    given = torch.from_numpy(np.ascontiguousarray(words, np.uint32).view(np.int32)).cuda()
    result = torch.zeros(32, num_out, dtype=torch.int32, device="cuda")
    function = _loaded(ptx)  # after the tensors: they make the context in which it is loaded
    addresses = [ctypes.c_uint64(tensor.data_ptr()) for tensor in (given, result)]
    parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(address) for address in addresses))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    sizes = [ctypes.c_uint(size) for size in (1, 1, 1, 32, 1, 1, SHARED)]
    _check(_driver().cuLaunchKernel(function, *sizes, stream, parameters, None))
    torch.cuda.synchronize()
    return result.cpu().numpy().view(np.uint32)
