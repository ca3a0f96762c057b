"""What the engine process does while it imports torch, which takes seconds. Needs no torch itself."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
from pathlib import Path

LIBCUDA = "libcuda.so.1"
TORCH_CUDA = "lib/libtorch_cuda.so"
INTEGRATED = 18
"""The driver's number for that question."""


def open_gpu(device: str, library: str = LIBCUDA) -> bool:
    """Make the context of the GPU that ``--device`` names, which takes its driver some tenths of a second; torch finds
    it made. The interpreter is free meanwhile. Whether there is one now; what is wrong with a GPU, torch tells.
    """
    found = _find(device, library)
    if found is None:
        return False
    driver, gpu = found
    context = ctypes.c_void_p()
    # The context that the runtime library uses. It is kept until the process ends.
    return not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)


def has_own_memory(device: str, library: str = LIBCUDA) -> bool:
    """Whether ``--device`` names a GPU that does not share its memory with the CPU."""
    found = _find(device, library)
    if found is None:
        return False
    driver, gpu = found
    shares = ctypes.c_int()
    return not driver.cuDeviceGetAttribute(ctypes.byref(shares), INTEGRATED, gpu) and not shares.value


def _find(device: str, library: str) -> tuple[ctypes.CDLL, ctypes.c_int] | None:
    """The driver, and its number for a GPU."""
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdigit():
        return None
    try:
        driver = ctypes.CDLL(library)
    except OSError:  # there is no driver
        return None
    gpu = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(gpu), int(number or 0))
    return None if failed else (driver, gpu)


def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for NVIDIA's GPUs. It is looked at, not imported."""
    found = importlib.util.find_spec("torch")
    return found is not None and found.origin is not None and (Path(found.origin).parent / TORCH_CUDA).is_file()


def start_opening(device: str) -> None:
    """Open the GPU in a thread, for a torch that can use it."""

    def work() -> None:
        with contextlib.suppress(Exception):  # who needs the GPU tells what is wrong
            if torch_has_cuda():
                open_gpu(device)

    threading.Thread(target=work, name="gpu", daemon=True).start()
