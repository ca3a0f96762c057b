"""A draft head as plans, memory and predictions see it: which ops it uses, what its weights take, what it caches.

As ``models/outline.py`` for models: the head's own constructor binds shapes alone to an ``Ops`` that lists each use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from microscale.backends.ops import Activations, Dense, Embedding, Use
from microscale.backends.recording_ops import RecordingOps, Unbound
from microscale.models.draft_heads.config import DFlashConfig, HeadConfig
from microscale.models.draft_heads.drafting import TargetEnds
from microscale.models.draft_heads.heads import bind_head, dummy_head
from microscale.models.dummy_weights import ShapeTensors
from microscale.models.outline import in_order


@dataclass(frozen=True)
class HeadOutline:
    """One head."""

    uses: tuple[Use, ...]
    """Of one pass through its layers. A chain makes one for each draft, a block one for all. What it shares with its
    target (embedding, lm_head) is not in it."""
    weight_bytes: int
    """As the checkpoint has them."""
    num_layers: int
    cached_numbers: int
    """Numbers that one position takes in its cache."""


def outline_head(config: HeadConfig, activations: Activations, page_size: int) -> HeadOutline:
    tensors, ops = ShapeTensors(), RecordingOps(activations)
    ends = TargetEnds(cast(Embedding, Unbound()), cast(Dense, Unbound()))
    bind_head(dummy_head(config, tensors), ops, torch.device("cpu"), page_size, ends)
    num_layers = config.num_layers if isinstance(config, DFlashConfig) else 1
    cached = 2 * num_layers * config.layer.num_kv_heads * config.layer.head_dim
    return HeadOutline(tuple(in_order(ops.layers)), tensors.num_bytes, num_layers, cached)
