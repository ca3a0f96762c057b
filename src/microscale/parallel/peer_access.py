"""Whether GPUs of this machine see each other's memory."""

from __future__ import annotations

import torch


def why_unmapped(device: torch.device, others: list[int]) -> str | None:
    """Why this GPU does not see the memory of some of these; ``None`` where it does."""
    own = device.index or 0
    for other in others:
        if other >= torch.cuda.device_count():
            return f"there is no GPU {other}"
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            return f"GPU {own} has no access to the memory of GPU {other}"
    return None
