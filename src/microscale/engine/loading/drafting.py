"""The draft head of an engine: opened and checked with the model, counted in its memory, loaded after it. And what
drafts cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from microscale.engine.limits import SHORT_CONTEXT
from microscale.engine.loading.memory import HeadNeed, op_working_bytes
from microscale.engine.predictions import Phase, predict
from microscale.engine.speculation.config import DFLASH, EAGLE3, MTP, SpeculativeConfig
from microscale.engine.speculation.length import DraftCosts
from microscale.errors import BadSetting
from microscale.hardware.draft_costs import head_us, host_ms, step_curve
from microscale.models import embedded, hub
from microscale.models.checkpoint import INDEX, SINGLE, Checkpoint, FromCheckpoint
from microscale.models.config import OWN_FORMATS, HeadFormats, LoadFormat
from microscale.models.draft_heads.config import HeadConfig
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds
from microscale.models.draft_heads.heads import bind_head, open_head_weights, outline_head
from microscale.models.draft_heads.weights import HeadWeights
from microscale.models.dummy_weights import RandomTensors, ShapeTensors
from microscale.models.families import AnyModel, ModelConfig, find_config, mtp_of
from microscale.models.json_object import read_json_object
from microscale.models.outline import Outline
from microscale.models.pre_norm import PreNormModel
from microscale.planning import registry
from microscale.planning.decision import Plan
from microscale.planning.ops import Activations, Ops
from microscale.planning.plan import Setup, Use, make_plan

OPTION = "--speculative-config"
_KINDS = {EAGLE3: "an EAGLE3", DFLASH: "a DFlash"}


@dataclass(frozen=True)
class PreparedHead:
    """A head that fits its target and can be loaded."""

    weights: HeadWeights
    """Open and checked, but not read."""
    setup: Setup
    plan: Plan
    need: HeadNeed
    read_bytes: float
    """Bytes of its own weights that a pass reads for one token."""

    @property
    def config(self) -> HeadConfig:
        return self.weights.config


def open_head(
    config: SpeculativeConfig,
    model: str,
    target: ModelConfig,
    *,
    offline: bool,
    load_format: LoadFormat | str = LoadFormat.AUTO,
    overrides: Mapping[str, object] | None = None,
    seed: int = 0,
) -> HeadWeights:
    """The head that the option names, checked to be of its method and to fit the target. That of ``mtp`` is in the
    target's own checkpoint; with ``load_format`` dummy it is random, as the target is."""
    if config.method == MTP:
        mtp = mtp_of(target)
        if load_format == LoadFormat.DUMMY:
            return mtp.dummy(mtp.config(target, None), RandomTensors(seed))
        whole = find_config(model, load_format, overrides or {}, offline)
        return mtp.open(hub.resolve(model, offline=offline), whole, target.shard)
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


def expect_head(
    config: SpeculativeConfig, model: str, target: ModelConfig, *, offline: bool, load_format: LoadFormat | str
) -> HeadWeights:
    """Like ``open_head``, but an MTP head is only shapes: its weights may not be downloaded yet."""
    if config.method != MTP:
        return open_head(config, model, target, offline=offline)
    mtp = mtp_of(target)
    names: Collection[str] | None = None
    if load_format != LoadFormat.DUMMY:
        folder = hub.resolve(model, offline=offline, config_only=True)
        if (folder / INDEX).exists():
            names = read_json_object(folder / INDEX).nested("weight_map").data
        elif (folder / SINGLE).exists():
            names = Checkpoint(folder).entries
    return mtp.dummy(mtp.config(target, names), ShapeTensors())


def _check(config: SpeculativeConfig, name: str, head: HeadConfig) -> None:
    if head.method != config.method:
        raise BadSetting(f"{OPTION}: {name} is {_KINDS[head.method]} head, and the method is {config.method}.")
    if head.most_drafts is not None and config.num_speculative_tokens > head.most_drafts:
        raise BadSetting(
            f"{OPTION}: {name} guesses blocks of up to {head.most_drafts} tokens, and num_speculative_tokens is "
            f"{config.num_speculative_tokens}."
        )
    if config.draft_lm_head is not None and not head.own_lm_head:
        raise BadSetting(f"{OPTION}: {name} takes the target's lm_head; leave draft_lm_head out.")


def prepare_head(
    weights: HeadWeights, target: Setup, page_size: int, formats: HeadFormats = OWN_FORMATS
) -> PreparedHead:
    """Plan a head for a target with this setup."""
    precision = target.precision.of_draft_head(formats.quantization, formats.lm_head)
    setup = replace(target, precision=precision)
    config = weights.config
    shape = outline_head(config, setup.activations, page_size)
    plan = make_plan("the draft head", shape.uses, setup)
    held = shape.other_bytes + _weight_bytes(shape.uses, plan)
    number = 4 if setup.activations is Activations.FLOAT32 else 2
    [qkv] = [use.spec.rows for use in shape.uses if use.layer == "qkv"]
    working = number * (config.reads.width + 4 * config.layer.hidden + 2 * qkv)
    drafting = sum(op_working_bytes(use.spec) for use in shape.uses if use.op == "moe") + len(config.own_rows) * 6
    need = HeadNeed(held, shape.cached_numbers, working, drafting)
    return PreparedHead(weights, setup, plan, need, shape.other_bytes + _read_bytes(shape.uses, plan))


def load_head(head: PreparedHead, model: AnyModel) -> DraftHead:
    """Read the head and put it behind its target."""
    setup = head.setup
    threads, ranks = model.ops.threads, model.ops.ranks
    ops = Ops(setup.gpu, setup.activations, setup.preference, setup.precision, head.plan, threads, ranks)
    ends = TargetEnds(model.embed, model.lm_head, model.norm if isinstance(model, PreNormModel) else None)
    weights, device = head.weights, model.device
    reading: AbstractContextManager[None] = nullcontext()
    if isinstance(weights, FromCheckpoint):  # one by one, the thousand tensors of an MTP layer would take seconds
        reading = weights.reading(device, lambda done, total: None)
    with torch.inference_mode(), reading:
        bound = bind_head(weights, ops, device, model.page_size, ends)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # experts in BF16, which are packed by now
    return bound


def _weight_bytes(uses: Sequence[Use], plan: Plan) -> int:
    """Bytes of the weights that ops hold, in the layouts that were decided."""
    decisions = [(use.count, plan.of(use.op, use.layer)[0]) for use in uses]
    return sum(
        count * registry.find(decision.op, decision.chosen).packed_bytes(decision.spec) for count, decision in decisions
    )


def _read_bytes(uses: Sequence[Use], plan: Plan) -> float:
    """Bytes of these that one token reads: ``top_k`` experts only."""

    def share(use: Use) -> float:
        return use.spec.top_k / use.spec.num_experts if use.op == "moe" else 1.0

    return sum(_weight_bytes([use], plan) * share(use) for use in uses)


def _share_of_step(read_by_head: float, read: float, shape: Outline, plan: Plan, setup: Setup) -> float:
    """A head's pass as a part of the target's step with one token, but no less than one of its layers."""
    if setup.gpu.is_cpu:  # whose steps are not predicted
        return read_by_head / read
    step = predict(shape, plan, setup, Phase.DECODE, 1, min(SHORT_CONTEXT, shape.max_context), 1)
    layers = sum(use.count for use in shape.uses if use.op in ("attention", "recurrent"))
    return max(head_us(read_by_head, setup.gpu) / step.us, 1 / max(layers, 1))


def draft_costs(
    shape: Outline, plan: Plan, setup: Setup, head: PreparedHead | None = None, *, on_device: bool = True
) -> DraftCosts:
    """What steps with drafts cost relative to steps without. ``head``: the drafter, if it is a model. ``on_device``:
    drafts need not be read before the next step is launched."""
    experts = next((use.spec for use in shape.uses if use.op == "moe"), None)
    num_experts, top_k = (1, 1) if experts is None else (experts.num_experts, experts.top_k)
    curve = step_curve(num_experts, top_k)
    one, read = 0.0, max(_read_bytes(shape.uses, plan), 1.0)
    if head is not None:
        lm_head = [use for use in shape.uses if use.layer == "lm_head"]
        read_by_head = head.read_bytes + (0 if head.config.own_lm_head else _weight_bytes(lm_head, plan))
        one = curve.at(1) * _share_of_step(read_by_head, read, shape, plan, setup)
    wait = None if on_device else partial(host_ms, gpu=setup.gpu)
    one_pass = head is not None and head.config.most_drafts is not None
    has_experts = head is not None and any(decision.op == "moe" for decision in head.plan.decisions.values())
    return DraftCosts(curve, one, one_pass, wait, curve.at(1) * shape.state_bytes / read, has_experts)
