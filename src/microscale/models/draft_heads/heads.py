"""Draft heads by what the user calls them: opened, or made of random numbers or of shapes, and bound for a target.

A head has an ``Ops`` of its own: its layers have the names that the target's have, so its plan is apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from microscale.backends.ops import OWN_FORMATS, HeadFormats, Ops
from microscale.models import hub
from microscale.models.config import ModelConfig
from microscale.models.draft_heads.config import DFlashConfig, HeadConfig
from microscale.models.draft_heads.config_file import open_draft_head
from microscale.models.draft_heads.dflash import DFlash
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds
from microscale.models.draft_heads.dummy_weights import DummyDFlash, DummyEagle3
from microscale.models.draft_heads.eagle3 import Eagle3
from microscale.models.draft_heads.presets import PRESETS
from microscale.models.draft_heads.weights import DFlashCheckpoint, Eagle3Checkpoint, check_fit
from microscale.models.dummy_weights import RandomTensors, TensorMaker

if TYPE_CHECKING:
    import torch

HeadWeights = Eagle3Checkpoint | DFlashCheckpoint | DummyEagle3 | DummyDFlash


def open_head_weights(model: str, target: ModelConfig, *, offline: bool = False) -> HeadWeights:
    """The head called ``model``: a folder, a hub id, or a preset of random numbers. It must fit the target. Of a target
    of which a rank has a part, it is that rank's."""
    if model in PRESETS:
        check_fit(PRESETS[model], target, model)
        return dummy_head(replace(PRESETS[model], shard=target.shard), RandomTensors())
    return open_draft_head(hub.resolve(model, offline=offline), target)


def ops_for_head(target: Ops, formats: HeadFormats = OWN_FORMATS) -> Ops:
    """On the target's device, with its kind of activations and KV. A head keeps the formats of its checkpoint, but for
    those that are asked for."""
    precision = target.precision.of_draft_head(formats)
    return Ops(target.gpu, target.activations, target.preference, precision, threads=target.threads, ranks=target.ranks)


def dummy_head(config: HeadConfig, make: TensorMaker) -> DummyEagle3 | DummyDFlash:
    """Without a checkpoint: random numbers, or shapes alone."""
    return DummyDFlash(config, make) if isinstance(config, DFlashConfig) else DummyEagle3(config, make)


def bind_head(weights: HeadWeights, ops: Ops, device: torch.device, page_size: int, ends: TargetEnds) -> DraftHead:
    """The head on its kernels. Its rows lie as the target's do, in pages of the same size."""
    if isinstance(weights, DFlashCheckpoint | DummyDFlash):
        return DFlash(weights, ops, device, page_size, ends)
    return Eagle3(weights, ops, device, page_size, ends)
