"""Counters by which the programs of one launch find out which of them finishes last. Owns the memory of the counters.

A kernel counts with ``atomic_add`` and its last program writes the zero back, so the counters are zero between launches
and clearing them is no launch of its own. A graph replays their address: they are kept for the life of the process.
Launches that count on one device must not overlap, which one stream sees to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

LEAST = 8192
_KEPT: dict[torch.device, list[Tensor]] = {}
"""Smaller ones first. Where more are needed, those before stay: graphs that were captured still count in them."""


def last_program_counters(device: torch.device, count: int) -> Tensor:
    """At least ``count`` int32 zeros, which the launch must leave as zeros."""
    kept = _KEPT.setdefault(device, [])
    if kept and kept[-1].numel() >= count:
        return kept[-1]
    made = torch.zeros(max(count, LEAST), dtype=torch.int32, device=device)
    # Made while a graph is captured, they are that graph's alone, which clears them at every replay.
    if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        kept.append(made)
    return made
