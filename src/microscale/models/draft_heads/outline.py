"""A draft head as plans, memory and predictions see it: which ops it uses, what its weights take, what it caches.

As ``models/outline.py`` for models: the head's own constructor binds shapes alone to an ``Ops`` that lists each use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from microscale.backends.ops import Activations, Dense, DenseSpec, Embedding, Use
from microscale.backends.recording_ops import RecordingOps, Unbound
from microscale.models.draft_heads.config import DFlashConfig, HeadConfig
from microscale.models.draft_heads.drafting import TargetEnds
from microscale.models.draft_heads.heads import bind_head, dummy_head
from microscale.models.dummy_weights import OutlineTensors
from microscale.models.outline import NOWHERE, in_order


@dataclass(frozen=True)
class HeadOutline:
    """One head."""

    uses: tuple[Use, ...]
    """Of one pass through its layers. A chain makes one for each draft, a block one for all. What it shares with its
    target (embedding, lm_head) is not in it."""
    weight_bytes: int
    """As the checkpoint has them."""
    other_bytes: int
    """Of these: what no op holds, norms and ``d2t``; and an embedding of its own."""
    num_layers: int
    cached_numbers: int
    """Numbers that one position takes in its cache."""


def outline_head(config: HeadConfig, activations: Activations, page_size: int) -> HeadOutline:
    tensors, ops = OutlineTensors(), RecordingOps(activations)
    ends = TargetEnds(cast(Embedding, Unbound()), cast(Dense, Unbound()))
    bind_head(dummy_head(config, tensors), ops, NOWHERE, page_size, ends)
    uses = in_order(ops.layers)
    num_layers = config.num_layers if isinstance(config, DFlashConfig) else 1
    cached = 2 * num_layers * config.layer.num_kv_heads * config.layer.head_dim
    dense = sum(2 * use.count * use.spec.rows * use.spec.columns for use in uses if isinstance(use.spec, DenseSpec))
    return HeadOutline(tuple(uses), tensors.num_bytes, tensors.num_bytes - dense, num_layers, cached)
