"""The draft head of an engine: found and checked with the model, reckoned with its memory, loaded behind it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from microscale.backends import registry
from microscale.backends.decision import Plan
from microscale.backends.head_formats import OWN_FORMATS, HeadFormats
from microscale.backends.ops import Activations, Ops
from microscale.backends.plan import Setup, make_plan
from microscale.engine.loading.memory import HeadNeed
from microscale.engine.speculation.config import EAGLE3, SpeculativeConfig
from microscale.errors import BadSetting
from microscale.models import embedded
from microscale.models.draft_heads.config import DFlashConfig, Eagle3Config, HeadConfig
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds
from microscale.models.draft_heads.heads import HeadWeights, bind_head, open_head_weights
from microscale.models.draft_heads.outline import outline_head
from microscale.models.families import AnyModel, ModelConfig

OPTION = "--speculative-config"


@dataclass(frozen=True)
class PreparedHead:
    """A head that can be loaded: it fits its target."""

    weights: HeadWeights
    """Open and checked; nothing is read of them yet."""
    setup: Setup
    plan: Plan
    need: HeadNeed

    @property
    def config(self) -> HeadConfig:
        return self.weights.config


def open_head(config: SpeculativeConfig, model: str, target: ModelConfig, *, offline: bool) -> HeadWeights:
    """The head that the option names, checked to be of its method and to fit the target."""
    name = config.model
    if name is None:
        if model != embedded.NAME or config.method != EAGLE3:
            raise BadSetting(
                f"{OPTION}: method {config.method} needs a draft head; name its folder or hub id as model."
            )
        name = str(embedded.DRAFT_HEAD)
    weights = open_head_weights(name, target, offline=offline)
    _check(config, name, weights.config)
    return weights


def _check(config: SpeculativeConfig, name: str, head: HeadConfig) -> None:
    kind = DFlashConfig if config.method != EAGLE3 else Eagle3Config
    if not isinstance(head, kind):
        other = "a DFlash head" if isinstance(head, DFlashConfig) else "an EAGLE3 head"
        raise BadSetting(f"{OPTION}: {name} is {other}, and the method is {config.method}.")
    if isinstance(head, DFlashConfig) and config.num_speculative_tokens >= head.block_size:
        raise BadSetting(
            f"{OPTION}: {name} guesses blocks of up to {head.block_size - 1} tokens, and num_speculative_tokens is "
            f"{config.num_speculative_tokens}."
        )
    if isinstance(head, Eagle3Config) and config.draft_lm_head is not None and not head.own_lm_head:
        raise BadSetting(f"{OPTION}: {name} takes the target's lm_head; leave draft_lm_head out.")


def prepare_head(
    weights: HeadWeights, target: Setup, page_size: int, formats: HeadFormats = OWN_FORMATS
) -> PreparedHead:
    """Plan a head for a target that is set up so."""
    setup = replace(target, precision=target.precision.of_draft_head(formats))
    config = weights.config
    shape = outline_head(config, setup.activations, page_size)
    plan = make_plan("the draft head", shape.uses, setup)
    held = shape.other_bytes
    for use in shape.uses:
        decision = plan.of(use.op, use.layer)[0]
        held += use.count * registry.find(use.op, decision.chosen).packed_bytes(decision.spec)
    number = 4 if setup.activations is Activations.FLOAT32 else 2
    working = number * (config.reads.width + 4 * config.layer.hidden + config.layer.qkv_rows)
    return PreparedHead(weights, setup, plan, HeadNeed(held, shape.cached_numbers, working, len(config.own_rows) * 6))


def load_head(head: PreparedHead, model: AnyModel) -> DraftHead:
    """Read the head and put it behind its target."""
    setup = head.setup
    threads, ranks = model.ops.threads, model.ops.ranks
    ops = Ops(setup.gpu, setup.activations, setup.preference, setup.precision, head.plan, threads, ranks)
    with torch.inference_mode():
        return bind_head(head.weights, ops, model.device, model.page_size, TargetEnds(model.embed, model.lm_head))
