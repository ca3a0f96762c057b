"""A driver for Triton that knows a card's SM and starts nothing: launches run up to the last call, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from microscale.hardware import Gpu
from microscale.hardware.targets import WARP_SIZE, target


class _Utils:
    def __init__(self, gpu: Gpu, loaded: list[str]) -> None:
        self._gpu = gpu
        self._loaded = loaded

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        assert binary[:4] == b"\x7fELF"
        self._loaded.append(name)
        return 1, 1, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": target(self._gpu.sm).shared_limit}


class CardDriver:
    """``loaded``: names of the kernels whose modules were loaded; ``launched``: of those that were launched."""

    def __init__(self, gpu: Gpu) -> None:
        self.loaded: list[str] = []
        self.launched: list[str] = []
        self.utils = _Utils(gpu, self.loaded)
        self._gpu = gpu

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launched.append(metadata.name)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._gpu.sm, WARP_SIZE)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


@contextmanager
def card_driver(gpu: Gpu) -> Iterator[CardDriver]:
    """Triton launches on this card. What was launched before, and what is launched inside, is forgotten."""
    before, driver._active = driver._active, CardDriver(gpu)
    _forget()
    try:
        yield driver._active
    finally:
        driver._active = before
        _forget()


def _forget() -> None:
    """As in a new process: no jit function knows a compiled kernel."""
    for name, module in list(sys.modules.items()):
        if name.startswith("microscale.kernels."):
            for value in vars(module).values():
                if isinstance(value, JITFunction):
                    value.device_caches.clear()
