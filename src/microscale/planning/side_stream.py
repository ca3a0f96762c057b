"""Two pieces of work at once: on a GPU two streams, in a CUDA graph two branches that join again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class SideStream:
    """Runs what does not depend on each other at once, where the device can."""

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(
        self, first: Callable[[], Tensor], second: Callable[[], Tensor], *, at_once: bool
    ) -> tuple[Tensor, Tensor]:
        """What both return; whoever follows on the present stream finds both done.

        Memory is safe without further ado. What ``first`` reads is held by the caller until the streams have joined.
        What it returns belongs to the side stream, which begins its next turn only after all that the present stream
        has been given by then, readers of this result included.
        """
        if self._side is None or not at_once:
            return first(), second()
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        with torch.cuda.stream(self._side):
            one = first()
        other = second()
        main.wait_stream(self._side)
        return one, other
