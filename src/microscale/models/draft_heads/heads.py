"""Draft heads by name: opened, or made of random numbers or shapes, and bound for a target. And what a head uses, as
plans, memory and the list of kernels see it.

A head has its own ``Ops``: its layers have the same names as the target's, so its plan is separate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch

from microscale.models import hub
from microscale.models.config import ModelConfig
from microscale.models.draft_heads.config import PRESETS, Eagle3Config, HeadConfig, MtpConfig
from microscale.models.draft_heads.config_file import open_draft_head
from microscale.models.draft_heads.dflash import DFlash
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds, Verified
from microscale.models.draft_heads.eagle3 import Eagle3
from microscale.models.draft_heads.weights import CheckpointHead, DummyHead, HeadWeights, check_fit
from microscale.models.dummy_weights import META, OutlineTensors, RandomTensors, ShapeTensors, TensorMaker
from microscale.models.families import mtp_of
from microscale.models.outline import NO_DEVICE, in_order
from microscale.models.recorded import MAX_TOKENS, PAGE_SIZE, steps
from microscale.parallel.sharding import split_vocabulary
from microscale.planning.ops import (
    Activations,
    Dense,
    DenseWeights,
    Embedding,
    Kernel,
    Launch,
    Ops,
    Use,
    recording,
)
from microscale.planning.recording_ops import RecordingOps, Unbound

if TYPE_CHECKING:
    from torch import Tensor

NUM_PAGES = 4
DRAFTS = 2
"""Of a recorded head. A chain's second step is like all later ones, and blocks of any size differ in rows alone."""


def open_head_weights(model: str, target: ModelConfig, *, offline: bool = False) -> CheckpointHead | DummyHead:
    """The head called ``model``: a folder, a hub id, or a preset of random numbers. It must fit the target. For a rank
    that has a part of the target, this is the rank's part of the head."""
    if model in PRESETS:
        check_fit(PRESETS[model], target, model)
        return DummyHead(replace(PRESETS[model], shard=target.shard), RandomTensors())
    return open_draft_head(hub.resolve(model, offline=offline), target)


def dummy_head(config: HeadConfig, make: TensorMaker) -> HeadWeights:
    """Weights that ``make`` makes."""
    return mtp_of(config.layer).dummy(config, make) if isinstance(config, MtpConfig) else DummyHead(config, make)


def bind_head(weights: HeadWeights, ops: Ops, device: torch.device, page_size: int, ends: TargetEnds) -> DraftHead:
    """The head on its kernels. Its rows lie as the target's do, in pages of the same size."""
    config = weights.config
    if isinstance(config, MtpConfig):
        return mtp_of(config.layer).bind(weights, ops, device, page_size, ends)
    kind = Eagle3 if isinstance(config, Eagle3Config) else DFlash
    return kind(weights, ops, device, page_size, ends)


# ---- what a head uses ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadOutline:
    """A head as ``models/outline.py`` describes models."""

    uses: tuple[Use, ...]
    """Of one pass through its layers: a DFlash head makes one for all drafts, the others one for each. Without what
    it shares with its target (embedding, lm_head)."""
    weight_bytes: int
    """As the checkpoint has them."""
    other_bytes: int
    """The part of these that no op holds: norms, ``d2t``, and an embedding of its own."""
    num_layers: int
    cached_numbers: int
    """Numbers that one position takes in its cache."""


def outline_head(config: HeadConfig, activations: Activations, page_size: int) -> HeadOutline:
    tensors, ops = OutlineTensors(), RecordingOps(activations)
    ends = TargetEnds(cast(Embedding, Unbound()), cast(Dense, Unbound()), cast("Tensor", Unbound()))
    bind_head(dummy_head(config, tensors), ops, NO_DEVICE, page_size, ends)
    uses = in_order(ops.layers)
    cached = 2 * config.num_layers * config.layer.num_kv_heads * config.layer.head_dim
    embed = 2 * config.reads.vocab_size * config.layer.hidden if config.own_embedding else 0
    other = tensors.num_bytes - ops.weight_bytes + embed
    return HeadOutline(tuple(uses), tensors.num_bytes, other, config.num_layers, cached)


def bind_head_shapes(config: HeadConfig, ops: Ops, page_size: int = PAGE_SIZE) -> DraftHead:
    """The head on weights that are shapes alone. If it uses the target's lm_head, that is bound in BF16."""
    hidden = config.reads.target_hidden
    table = torch.empty((config.reads.vocab_size, hidden), dtype=torch.bfloat16, device=META)
    rows = split_vocabulary(config.reads.vocab_size, config.shard)
    own = Ops(ops.gpu, ops.activations, ops.preference).dense("lm_head", DenseWeights(table[: len(rows)]))
    norm = torch.empty(hidden, dtype=torch.float32, device=META)
    ends = TargetEnds(ops.embed(table), own, norm)
    return bind_head(dummy_head(config, ShapeTensors()), ops, torch.device(META), page_size, ends)


def record_head(head: DraftHead, max_context: int, max_tokens: int = MAX_TOKENS) -> dict[Kernel, Launch]:
    """Every kernel that the bound head may start behind steps of its target of up to ``max_tokens`` tokens: its own
    ``draft`` runs on tensors without memory, at all sizes."""
    kv, reads = head.new_cache(NUM_PAGES), head.config.reads
    count = min(DRAFTS, head.config.most_drafts or DRAFTS)
    with recording() as found:
        for step in steps(max_context, head.page_size, max_tokens):
            rows = step.sequences if step.rows is None else step.rows
            batch = replace(step, rows=rows).batch()
            tapped = torch.empty((step.tokens, reads.width), dtype=head.ops.dtype, device=META)
            head.draft(Verified(batch, tapped), kv, count)
    return found
