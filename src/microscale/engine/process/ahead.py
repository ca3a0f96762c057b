"""What the engine process does while it imports torch, which takes seconds. Needs no torch itself."""

from __future__ import annotations

import contextlib
import ctypes
import threading

LIBCUDA = "libcuda.so.1"


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


def start_opening(device: str) -> None:
    """The same in a thread."""

    def work() -> None:
        with contextlib.suppress(AttributeError):  # a library of this name that is no driver
            open_gpu(device)

    threading.Thread(target=work, name="gpu", daemon=True).start()
