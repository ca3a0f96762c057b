"""What the engine process does while it imports torch, which takes seconds. Needs no torch itself."""

from __future__ import annotations

import contextlib
import importlib.util
import threading
from pathlib import Path

from microscale.engine.process.driver import LIBCUDA, find

TORCH_CUDA = "lib/libtorch_cuda.so"


def open_gpu(device: str, library: str = LIBCUDA) -> bool:
    """Make the context of the GPU that ``--device`` names, which takes its driver some tenths of a second; torch finds
    it made. The interpreter is free meanwhile. Whether there is one now; what is wrong with a GPU, torch tells.
    """
    gpu = find(device, library)
    return gpu is not None and gpu.retain() is not None


def has_own_memory(device: str, library: str = LIBCUDA) -> bool:
    """Whether ``--device`` names a GPU that does not share its memory with the CPU."""
    gpu = find(device, library)
    return gpu is not None and gpu.shares_memory() is False


def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for NVIDIA's GPUs. It is looked at, not imported."""
    found = importlib.util.find_spec("torch")
    return found is not None and found.origin is not None and (Path(found.origin).parent / TORCH_CUDA).is_file()


def start_driver(library: str = LIBCUDA) -> None:
    """Start the driver in a thread, before it is known which GPU is wanted, if any is."""

    def work() -> None:
        with contextlib.suppress(Exception):  # who needs the GPU tells what is wrong
            if torch_has_cuda():
                find("auto", library)

    threading.Thread(target=work, name="driver", daemon=True).start()


def start_opening(device: str) -> None:
    """Open the GPU in a thread, for a torch that can use it."""

    def work() -> None:
        with contextlib.suppress(Exception):  # who needs the GPU tells what is wrong
            if torch_has_cuda():
                open_gpu(device)

    threading.Thread(target=work, name="gpu", daemon=True).start()
