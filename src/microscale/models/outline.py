"""A model as plans, memory and predictions see it: which ops it uses how often, what it caches, what else it holds.

The list is not written by hand: the model's own constructor binds shape-only weights to ``RecordingOps``, which lists
each use. Models bind the parts of a layer in the order in which they run. Two things follow from it: the order of the
list, and which parts of the last layer run for tokens with logits alone, namely attention and all that is bound after
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from microscale.errors import BadSetting
from microscale.models.config import MAX_DRAFT, LayerKind, ModelConfig
from microscale.models.dummy_weights import OutlineTensors
from microscale.models.families import build_model, shape_weights
from microscale.parallel.sharding import Shard
from microscale.planning.ops import Activations, AttentionSpec, RecurrentSpec, Use
from microscale.planning.recording_ops import RecordingOps

if TYPE_CHECKING:
    import torch

NO_DEVICE = cast("torch.device", SimpleNamespace(type="none"))
"""Where shapes are."""
MIXERS = ("attention", "recurrent")
"""One of these is in each decoder layer, and tells its kind."""
AT_THE_END = ("lm_head", "sampling")
"""Behind the last decoder layer."""


@dataclass(frozen=True)
class CachedLayers:
    """Layers that cache keys and values alike."""

    kind: LayerKind
    count: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    def numbers_per_position(self) -> int:
        """Numbers that one position takes in all these layers."""
        return 2 * self.count * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class Outline:
    """One model."""

    name: str
    uses: tuple[Use, ...]
    cached: tuple[CachedLayers, ...]
    state_bytes: int
    """Of one sequence, in all layers with states."""
    vocab_size: int
    hidden: int
    tied: bool
    """The embedding table and lm_head are one tensor."""
    other_bytes: int
    """Of what no op holds: norms, sinks and routers."""
    max_context: int
    closing: frozenset[str]
    """Layers whose last one only tokens with logits pass: lm_head, sampling, and the last decoder layer's parts behind
    its keys and values."""
    weights_only: bool = False
    """The checkpoint's NVFP4 weights are published for activations in BF16."""

    @property
    def most_drafts(self) -> int:
        """Per sequence and step: a slot of states holds the columns of only a few tokens."""
        return min(
            (use.spec.most_drafts for use in self.uses if isinstance(use.spec, RecurrentSpec)), default=MAX_DRAFT
        )

    def check_drafts(self, count: int) -> None:
        """Refuse more."""
        if count > self.most_drafts:
            raise BadSetting(
                f"{self.name} has layers with states, which verify up to {self.most_drafts} drafts per sequence; ask "
                f"for {self.most_drafts}, not {count}."
            )


def shard_name(model: str, shard: Shard) -> str:
    """What one rank's part of a model is called; nothing that was measured of the whole is known of it."""
    return model if shard.is_whole else f"{model}, rank {shard.rank} of {shard.world}"


def outline(name: str, config: ModelConfig, activations: Activations, page_size: int, context: int) -> Outline:
    """The outline of a model whose attention sees up to ``context`` positions."""
    tensors, ops = OutlineTensors(), RecordingOps(activations)
    build_model(shape_weights(config, tensors), ops, NO_DEVICE, page_size, ops.layer_done)
    uses = tuple(_seeing(use, context) for use in in_order(ops.layers))
    cached = tuple(
        CachedLayers(LayerKind(use.layer), use.count, use.spec.num_kv_heads, use.spec.head_dim, use.spec.window)
        for use in uses
        if isinstance(use.spec, AttentionSpec)
    )
    states = sum(use.count * use.spec.slot_bytes for use in uses if isinstance(use.spec, RecurrentSpec))
    *_, last, behind = ops.layers
    closing = frozenset(use.layer for use in (*_after_keys(last), *behind))
    other = tensors.num_bytes - ops.weight_bytes
    sizes = (config.vocab_size, config.hidden, ops.tied, other, config.max_context)
    return Outline(name, uses, cached, states, *sizes, closing, config.weights_only)


def in_order(layers: Sequence[Sequence[Use]]) -> list[Use]:
    """Every use once, with how often it is there. Layers of one kind are listed part by part, in all
    formats that a part has. A part that only a later kind has comes before what follows it there."""
    counts: Counter[Use] = Counter(use for layer in layers for use in layer)
    kinds: dict[str | None, list[Sequence[Use]]] = {}
    for layer in layers:
        kinds.setdefault(next((use.layer for use in layer if use.op in MIXERS), None), []).append(layer)
    order: list[Use] = []
    for alike in kinds.values():
        place = len(order)
        parts = dict.fromkeys(use for part in zip_longest(*alike) for use in part if use is not None)
        for use in reversed(parts):
            if use in order:
                place = order.index(use)
            else:
                order.insert(place, use)
    names = {(use.op, use.layer): use for use in order}
    for use in order:
        same = names[use.op, use.layer]
        assert same == use, f"{use.layer} names layers that differ: {use.spec} and {same.spec}"
    return [replace(use, count=counts[use]) for use in order]


def _seeing(use: Use, context: int) -> Use:
    return replace(use, spec=replace(use.spec, context=context)) if isinstance(use.spec, AttentionSpec) else use


def _after_keys(layer: Sequence[Use]) -> list[Use]:
    """Attention and what is bound after it. The small ops are on both sides of it."""
    first = next(place for place, use in enumerate(layer) if use.op == "attention")
    return [use for use in layer[first:] if use.op != "small"]
