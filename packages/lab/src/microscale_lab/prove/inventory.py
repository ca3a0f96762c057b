"""The list that ``prove`` compiles: what the models start on a card, recorded from the code that starts it.

Every preset and the embedded model, in every precision that a user can ask for (``SETTINGS``), the expert
layers as vLLM's ranks hold them, and draft heads. Nothing here names a kernel: a kernel that is never started is not
proved, and one that is started and not proved fails ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from microscale.errors import Unsupported
from microscale.hardware import Gpu
from microscale.kernels.launch import Kernel, Launch
from microscale.models.config import MAX_DRAFT, PAGED
from microscale.models.draft_heads.config import PRESETS as HEADS
from microscale.models.draft_heads.config import HeadConfig
from microscale.models.draft_heads.heads import bind_head_shapes, record_head
from microscale.models.embedded import NAME, embedded_folder
from microscale.models.families import FAMILIES, PRESETS, ModelConfig, read_model_config
from microscale.models.outline import outline
from microscale.models.recorded import PAGE_SIZE, bind_shapes, record, token_counts
from microscale.planning.following import record_following
from microscale.planning.ops import Activations, MoeSpec, Ops, Preference, Use
from microscale.planning.precision import Precision, make_precision
from microscale.planning.shards import record_moe, shards

DENSE = ("qkv", "o", "mlp", "lm_head")


@dataclass(frozen=True)
class Setting:
    """What a user may ask of a model: a precision, and implementations by name."""

    precision: str = "exact"
    dense: str | None = None
    """Format of all dense layers."""
    experts: str | None = None
    moe_activations: str = "auto"
    kv: str = "auto"
    preference: Preference = field(default_factory=Preference)

    def resolve(self, layers: Sequence[str]) -> Precision:
        """The precision of a model with these layers."""
        formats = {layer: self.dense for layer in DENSE if layer in layers and self.dense}
        formats |= {"experts": self.experts} if self.experts else {}
        chosen = [f"{layer}={fmt}" for layer, fmt in formats.items()]
        return make_precision(self.precision, chosen, self.moe_activations, self.kv)


SETTINGS = (
    Setting(),
    Setting("balanced"),
    Setting("fast"),
    # Every format of dense layers, experts and KV, and activations in both, by themselves.
    Setting(dense="fp8", moe_activations="mxfp8", kv="fp8"),
    Setting(dense="mxfp8", experts="mxfp4"),
    Setting(dense="mxfp4", experts="mxfp8"),
    Setting(experts="mxfp4", moe_activations="mxfp8"),
    Setting(experts="mxfp8", moe_activations="mxfp8"),
    # Where the oracle would take narrow activations for some sizes only.
    Setting("fast", dense="mxfp8", preference=Preference(backend="triton_mxfp8_a8")),
    Setting("fast", preference=Preference(backend="triton_mxfp4_a8")),
    Setting(experts="nvfp4", moe_activations="nvfp4"),
    Setting("fast", dense="nvfp4", preference=Preference(backend="triton_nvfp4_a4")),
)
HEAD_PRECISIONS = (
    make_precision().of_draft_head(),
    make_precision(kv_cache_dtype="fp8").of_draft_head(lm_head="mxfp8"),
    make_precision().of_draft_head("mxfp8"),
)
"""What a user may ask of a draft head."""
HEAD_CONTEXT = 1 << 17
"""Positions of the longest target: heads share the widths of its page tables."""


@cache
def models() -> Mapping[str, ModelConfig]:
    """The models whose kernels are proved, by the names that users type."""
    return {**PRESETS, NAME: read_model_config(embedded_folder())}


@cache
def heads() -> Mapping[str, HeadConfig]:
    """Draft heads: those with a preset, and one for each distinct MTP layer of a model with a preset."""
    mtp: dict[HeadConfig, str] = {}
    for family in FAMILIES:
        if family.mtp is not None:
            presets = reversed([*family.presets.items()])
            mtp |= {family.mtp.config(config, None): f"{name}-mtp" for name, config in presets}
    return {**HEADS, **{name: config for config, name in mtp.items()}}


def recorded(
    gpu: Gpu, names: Sequence[str] | None = None, settings: Sequence[Setting] = SETTINGS
) -> dict[Kernel, list[str]]:
    """Every kernel that may be started on this card, with the models that start it; by default those of all models and
    draft heads, by their names."""
    found: dict[Kernel, list[str]] = {}
    for name in (*models(), *heads()) if names is None else names:
        head = heads().get(name)
        of_name = _of_model(name, models()[name], gpu, settings) if head is None else _of_head(name, head, gpu)
        for source, kernels in of_name:
            for kernel in kernels:
                users = found.setdefault(kernel, [])
                if source not in users:
                    users.append(source)
    return found


def _of_model(
    name: str, config: ModelConfig, gpu: Gpu, settings: Sequence[Setting]
) -> Iterator[tuple[str, dict[Kernel, Launch]]]:
    for setting in settings:
        kernels = record_setting(config, gpu, setting)
        if kernels is not None:
            yield name, kernels
    for shard in shards(_experts(name, config)):
        try:
            yield f"{name} in vLLM", record_moe(shard, gpu, token_counts())
        except Unsupported:
            continue


def _of_head(name: str, config: HeadConfig, gpu: Gpu) -> Iterator[tuple[str, dict[Kernel, Launch]]]:
    for precision in HEAD_PRECISIONS:
        ops = Ops(gpu, Activations.BF16, Preference(), precision)
        yield name, record_head(bind_head_shapes(config, ops), HEAD_CONTEXT)


def record_setting(config: ModelConfig, gpu: Gpu, setting: Setting) -> dict[Kernel, Launch] | None:
    """The kernels of a model with this setting; ``None`` where the card does not support it."""
    layers = {use.layer.partition(".")[0] for use in _uses("", config)}
    try:
        ops = Ops(gpu, Activations.BF16, setting.preference, setting.resolve(sorted(layers)))
        return record(bind_shapes(config, ops), draft_tokens=MAX_DRAFT) | record_following(len(PAGED))
    except Unsupported:
        return None


def _uses(name: str, config: ModelConfig) -> tuple[Use, ...]:
    return outline(name, config, Activations.BF16, PAGE_SIZE, config.max_context).uses


def _experts(name: str, config: ModelConfig) -> MoeSpec:
    return next(use.spec for use in _uses(name, config) if isinstance(use.spec, MoeSpec))
