"""What all ranks must have alike before they load parts of one model, by what it is."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
import triton

from microscale.models.checkpoint import FromCheckpoint
from microscale.models.config import OWN_FORMATS, HeadFormats
from microscale.models.draft_heads.weights import HeadWeights
from microscale.models.families import ModelWeights
from microscale.parallel.sharding import WHOLE
from microscale.planning.plan import Setup


def fingerprint(
    weights: ModelWeights, setup: Setup, seed: int, head: HeadWeights | None = None, formats: HeadFormats = OWN_FORMATS
) -> dict[str, str]:
    """Texts that are compared, and shown where they differ. ``formats``: of the head."""
    found = {
        "model": _digest(repr(_without_rank(weights.config))),
        "checkpoint": _checkpoint(weights, seed),
        "precision": str(setup.precision),
        "type of activations": setup.activations.value,
        "torch": str(torch.__version__),
        "Triton": triton.__version__,
    }
    if head is not None:
        found["draft head"] = f"{_digest(repr(_without_rank(head.config)))}, {_checkpoint(head, 0)}"
        found["draft head's formats"] = f"all {formats.quantization}, lm_head {formats.lm_head}"
    return found


def _without_rank(config: Any) -> object:
    """All ranks' parts have the same sizes."""
    return replace(config, shard=WHOLE)


def _checkpoint(weights: ModelWeights | HeadWeights, seed: int) -> str:
    """Names, types, shapes and places of all tensors; not their numbers, which nobody reads twice."""
    if not isinstance(weights, FromCheckpoint):
        return f"random weights of seed {seed}"
    entries = sorted(weights.all_entries, key=lambda entry: entry.name)
    told = [(e.file.name, e.name, e.dtype, e.shape, e.begin, e.end, e.stamp.size) for e in entries]
    return _digest(repr(told))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
