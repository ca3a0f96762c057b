"""What the engine process does while it imports torch, which takes seconds. Needs no torch itself."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import threading
from pathlib import Path

LIBCUDA = "libcuda.so.1"
TORCH_CUDA = "lib/libtorch_cuda.so"


def open_gpu(device: str, library: str = LIBCUDA) -> bool:
    """Make the context of the GPU that ``--device`` names, which takes its driver some tenths of a second; torch finds
    it made. The interpreter is free meanwhile. Whether there is one now; what is wrong with a GPU, torch tells.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdigit():
        return False
    try:
        driver = ctypes.CDLL(library)
    except OSError:  # there is no driver
        return False
    gpu, context = ctypes.c_int(), ctypes.c_void_p()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(gpu), int(number or 0))
    # The context that the runtime library uses. It is kept until the process ends.
    return not (failed or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu))


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
