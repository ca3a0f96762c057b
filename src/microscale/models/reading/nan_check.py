"""Refuses NaN in what was read: it would run through a model as silence.

The device checks; the host must wait for the result. On a GPU it reads the results of many tensors at a time, so that
reading, copying and packing go on meanwhile, and those of the last ones before the load is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from microscale.errors import BadCheckpoint
from microscale.formats import SCALE_NAN
from microscale.models.safetensors_header import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

TOGETHER = {"cpu": 1, "cuda": 64}
"""Tensors whose results the host reads in one wait."""

_SCALES = ("_scales", ".scales", "_scale")
_GLOBAL_SCALES = (".weight_scale_2", ".weight_global_scale")
"""Of NVFP4: one is multiplied, the other divided by."""
_E4M3_NAN = 0x7F
"""With either sign."""


class NanCheck:
    """NaN and infinity are refused, and so is 255, the NaN of E8M0, in scales."""

    def __init__(self, together: int) -> None:
        self._together = together
        self._looked_at: list[tuple[TensorEntry, Tensor, str]] = []

    def look(self, entry: TensorEntry, tensor: Tensor) -> None:
        """Look at a tensor; refuse it, or one of those before, if it is time to read their results."""
        result = _find(entry, tensor)
        if result is not None:
            self._looked_at.append((entry, *result))
            if len(self._looked_at) >= self._together:
                self.settle()

    def settle(self) -> None:
        """Refuse the bad tensors so far."""
        looked_at, self._looked_at = self._looked_at, []
        if not looked_at:
            return
        answers = torch.stack([bad for _, bad, _ in looked_at]).tolist()
        for (entry, _, what), bad in zip(looked_at, answers, strict=True):
            if bad:
                raise BadCheckpoint(f"{entry.file}: tensor {entry.name!r} contains {what}.")


def _find(entry: TensorEntry, tensor: Tensor) -> tuple[Tensor, str] | None:
    """Whether the tensor is bad, as the device will know, and by what; ``None`` where it cannot be."""
    if tensor.numel() == 0:
        return None
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor = tensor.view(torch.uint8)
    if tensor.dtype == torch.float8_e4m3fn:
        return (tensor.view(torch.uint8) & _E4M3_NAN).max() == _E4M3_NAN, "NaN"
    if entry.name.endswith(_GLOBAL_SCALES):
        return ~(torch.isfinite(tensor) & (tensor > 0)).all(), "a scale that is not above 0"
    if tensor.is_floating_point():
        # Both ends are NaN if any element is. 0.7 ns an element on one core; isfinite takes 9 and twice the memory.
        ends = torch.stack(torch.aminmax(tensor)).float()
        return ~torch.isfinite(ends).all(), "NaN or infinity"
    if tensor.dtype == torch.uint8 and entry.name.endswith(_SCALES):
        return tensor.max() == SCALE_NAN, f"the scale byte {SCALE_NAN}, which is NaN"
    return None
