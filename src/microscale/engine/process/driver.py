"""The CUDA driver by its C functions: a GPU's primary context, which torch uses too, and memory in it. Needs no torch.

The interpreter is free during every call. Pointers are plain numbers here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

LIBCUDA = "libcuda.so.1"
INTEGRATED = 18
"""The driver's number for the question whether a GPU shares the CPU's memory."""
OUT_OF_MEMORY = 2


class DriverError(Exception):
    """The driver refused a call."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver knows it."""

    driver: ctypes.CDLL
    number: ctypes.c_int

    def shares_memory(self) -> bool | None:
        """Whether CPU and GPU share their memory; ``None`` where the driver does not tell."""
        shares = ctypes.c_int()
        failed = self.driver.cuDeviceGetAttribute(ctypes.byref(shares), INTEGRATED, self.number)
        return None if failed else bool(shares.value)

    def retain(self) -> ctypes.c_void_p | None:
        """The context that the runtime library uses. It is kept until the process ends."""
        context = ctypes.c_void_p()
        return None if self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.number) else context


def find(device: str, library: str = LIBCUDA) -> Gpu | None:
    """The GPU that ``--device`` names; ``None`` for anything else, and where there is no driver."""
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdigit():
        return None
    try:
        driver = ctypes.CDLL(library)
    except OSError:  # there is no driver
        return None
    gpu = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(gpu), int(number or 0))
    return None if failed else Gpu(driver, gpu)


_SIZE, _DEVICE, _HOST = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_void_p
_FUNCTIONS: dict[str, list[type[ctypes._SimpleCData[int]] | type[ctypes.c_void_p]]] = {
    "cuCtxSetCurrent": [_HOST],
    "cuCtxSynchronize": [],
    "cuMemGetInfo_v2": [_HOST, _HOST],
    "cuMemAlloc_v2": [_HOST, _SIZE],
    "cuMemFree_v2": [_DEVICE],
    "cuMemHostAlloc": [_HOST, _SIZE, ctypes.c_uint],
    "cuMemFreeHost": [_HOST],
    "cuMemcpyHtoD_v2": [_DEVICE, _HOST, _SIZE],
}
"""What ``Memory`` calls, with the types of its arguments. ``_v2``: the names of this ABI, with sizes of 64 bits."""


class Memory:
    """Memory of one GPU, and pinned memory beside it. Each thread calls ``enter`` first."""

    def __init__(self, device: str, library: str = LIBCUDA) -> None:
        """Makes the context, if there is none: that takes the driver some tenths of a second."""
        gpu = find(device, library)
        if gpu is None:
            raise DriverError("there is no such GPU")
        context = gpu.retain()
        if context is None:
            raise DriverError("the GPU cannot be opened")
        self._context = context
        # Types of arguments belong to a library object: this one is nobody else's.
        self._library = ctypes.CDLL(library)
        try:
            for name, types in _FUNCTIONS.items():
                getattr(self._library, name).argtypes = types
        except AttributeError as error:
            raise DriverError(f"the driver is too old: {error}") from error

    def enter(self) -> None:
        """Make the context this thread's own."""
        self._call("cuCtxSetCurrent", self._context)

    def free(self) -> int:
        """Bytes that can still be allocated."""
        free, total = _SIZE(), _SIZE()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, num_bytes: int) -> int:
        address = _DEVICE()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        return address.value

    def release(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    @contextmanager
    def pinned(self, num_bytes: int) -> Iterator[int]:
        """Pinned memory of the host, which begins at a page."""
        address = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(address), num_bytes, 0)
        assert address.value is not None
        try:
            yield address.value
        finally:
            self._call("cuMemFreeHost", address)

    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        """From pinned memory to the GPU. Waits for its end."""
        self._call("cuMemcpyHtoD_v2", address, source, num_bytes)

    def synchronize(self) -> None:
        """Wait for all that anybody has started on the GPU."""
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            what = "the GPU's memory is full" if status == OUT_OF_MEMORY else f"{name} gave {status}"
            raise DriverError(what)
