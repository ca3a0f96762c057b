"""Triton's driver on a machine without a GPU: kernels are specialised, compiled and loaded as on one, and not started.

What it loads and starts is listed, so a test sees the machine code and the attributes of a launch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from microscale.hardware import WARP_SIZE, Gpu


@dataclass
class Loaded:
    name: str
    cubin: bytes
    shared: int


@dataclass
class FakeUtils:
    gpu: Gpu
    loaded: list[Loaded] = field(default_factory=list)

    def get_device_properties(self, device: int) -> dict[str, int]:
        assert type(device) is int
        return {
            "max_shared_mem": self.gpu.shared_per_block,
            "multiprocessor_count": self.gpu.num_sms,
            "warpSize": WARP_SIZE,
        }

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert type(device) is int
        assert cubin[:4] == b"\x7fELF"
        self.loaded.append(Loaded(name, cubin, shared))
        return 1, 1, 32, 0, 1024


@dataclass
class FakeDriver:
    gpu: Gpu
    utils: FakeUtils
    launched: list[Any] = field(default_factory=list)
    """The metadata of every launch."""
    given: list[tuple[Any, ...]] = field(default_factory=list)
    """What every launch gave to the driver: grid, stream, function, the launch's own attributes, hooks, arguments."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.gpu.sm, WARP_SIZE)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_current_stream(self, device: int) -> int:
        assert type(device) is int
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def start(*given: Any) -> None:
            self.launched.append(metadata)
            self.given.append(given)

        return start


@contextmanager
def faked(gpu: Gpu) -> Iterator[FakeDriver]:
    """Inside, Triton believes that ``gpu`` is here."""
    before = driver._active
    found = FakeDriver(gpu, FakeUtils(gpu))
    driver.set_active(found)
    try:
        yield found
    finally:
        driver._active = before


@contextmanager
def faked_anew(gpu: Gpu) -> Iterator[FakeDriver]:
    """The same in a process that has launched nothing: no jit function of ours knows a compiled kernel."""
    _forget()
    try:
        with faked(gpu) as found:
            yield found
    finally:
        _forget()


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("microscale.kernels."):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()
