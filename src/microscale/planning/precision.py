"""Precisions: in which format each layer's weights, the activations and the KV cache are held.

``exact`` keeps the checkpoint's own formats, bf16 activations and KV. ``balanced`` holds dense layers and lm_head in
eight bits and lets experts meet MXFP8 activations where that is faster. ``fast`` holds them in MXFP4, lets dense layers
meet MXFP8 activations too, and keeps the KV cache in FP8. NVFP4 weights meet NVFP4 activations there. Both hold BF16
experts, for which no kernel is, in MXFP8; ``exact`` refuses them. A precision never widens what a checkpoint stores
narrower, and never rounds it to another format of as many bits: a checkpoint in FP8 keeps its weights in ``balanced``,
one in NVFP4 in ``fast`` too.

One record holds the precision and what the user changed of it; the oracle, the loader and ``explain`` follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from microscale.errors import BadSetting, Unsupported
from microscale.formats import BLOCK, FORMATS, NVFP4
from microscale.kernels.numbers import FRAGMENT_ROWS
from microscale.kernels.op import Activations
from microscale.planning.option_values import (
    AUTO,
    KV_CACHE_DTYPES,
    LAYERS,
    MOE_ACTIVATIONS,
    PRECISION_NAMES,
    one_of,
    parse_layer_formats,
)

BITS: Mapping[str, float] = {
    "bf16": 16.0,
    "fp8": 8.0,
    **{name: fmt.bits_per_value for name, fmt in FORMATS.items()},
}
"""Bits of one weight, its share of the scale included (one scale a row is nothing)."""
HEAD_LAYERS = ("fc", "qkv", "o", "mlp", "lm_head")
"""Dense layers of a draft head."""


@dataclass(frozen=True)
class Precision:
    """How a model is held and computed."""

    name: str
    formats: tuple[tuple[str, str], ...] = ()
    """(layer, format); layers that are not named keep their own format."""
    narrow_activations: tuple[str, ...] = ()
    """Ops that may quantise their activations where that is faster: to MXFP8, or to NVFP4 as follows."""
    nvfp4_activations: bool = False
    """Whether these ops have NVFP4 activations where their weights are NVFP4."""
    kv: str = "bf16"
    chosen: tuple[tuple[str, str], ...] = ()
    """(layer, format) that the user asked for by ``--layer-format``; they go before ``formats``."""
    moe_activations: str = "auto"
    """``--moe-activations``: ``bf16``, ``mxfp8`` and ``nvfp4`` are preferences, ``auto`` is the precision's."""
    kv_cache_dtype: str = "auto"
    """``--kv-cache-dtype``: likewise."""
    weights_only: bool = False
    """The checkpoint's NVFP4 weights are published for activations in BF16, and get others only if the user asks."""
    where_it_fits: bool = False
    """Layers whose shapes do not fit ``formats`` keep their own, and the plan says why (draft heads). Elsewhere they
    are refused."""

    def format_of(self, layer: str, own: str) -> str:
        """The format in which a layer is held whose checkpoint has it in ``own``. ``mlp.down`` follows ``mlp``."""
        name = layer.partition(".")[0]
        if name in dict(self.chosen):
            return dict(self.chosen)[name]
        planned = dict(self.formats).get(name, own)
        # Whole bits: another format of as many, such as MXFP4 for NVFP4, would only round once more.
        return planned if int(BITS[planned]) < int(BITS[own]) else own

    def applied(self, layer: str, spec: Any) -> Any:
        """A layer's spec in the format that it will be held in."""
        if not hasattr(spec, "weight_format"):
            return spec
        held = self.format_of(layer, spec.weight_format)
        if self.keeps_own(layer, spec) is not None:
            return spec
        columns = getattr(spec, "columns", BLOCK)  # widths of experts are checked with the config
        if held in FORMATS and columns % (block := FORMATS[held].block):
            raise Unsupported(
                f"{self.option(layer)} holds {layer} in {held}, whose blocks of {block} do not divide its {columns} "
                f"columns; add --layer-format {layer.partition('.')[0]}=fp8."
            )
        return replace(spec, weight_format=held)

    def keeps_own(self, layer: str, spec: Any) -> str | None:
        """Why a layer stays in its checkpoint's format although ``formats`` has another: kernels read a block format in
        tiles of 16 rows and in blocks of 32 columns. ``None`` where it does not, and where that is refused instead."""
        own = getattr(spec, "weight_format", "")
        named = layer.partition(".")[0] in dict(self.chosen)
        if not self.where_it_fits or not hasattr(spec, "columns") or named or self.format_of(layer, own) not in FORMATS:
            return None
        if spec.columns % BLOCK or spec.rows % FRAGMENT_ROWS:
            needs = f"multiples of {FRAGMENT_ROWS} rows and {BLOCK} columns"
            return f"needs {needs}, not {spec.rows} and {spec.columns}; {layer} stays {own}"
        return None

    def activations(self, op: str, base: Activations, weight_format: str) -> tuple[Activations, ...]:
        """The formats in which activations may meet the weights of an op, the most exact first."""
        if op == "moe" and self.moe_activations != "auto":
            return (base,) if self.moe_activations == "bf16" else (Activations(self.moe_activations),)
        if op not in self.narrow_activations or base is not Activations.BF16:
            return (base,)
        nvfp4 = self.nvfp4_activations and not self.weights_only and weight_format == NVFP4.name
        return base, Activations.NVFP4 if nvfp4 else Activations.MXFP8

    def of_draft_head(self, quantization: str | None = None, lm_head: str | None = None) -> Precision:
        """The precision of a model's draft head: the model's KV cache and the checkpoint's formats, except that BF16
        experts become MXFP8. ``quantization``: the format of all dense layers; ``lm_head``: that of its lm_head."""
        formats = () if quantization is None else tuple((layer, quantization) for layer in HEAD_LAYERS)
        formats += (_EXPERTS,)
        chosen = (("lm_head", lm_head),) if lm_head is not None and lm_head != quantization else ()
        plain = replace(self, formats=formats, narrow_activations=(), moe_activations=AUTO)
        return replace(plain, chosen=chosen, where_it_fits=True)

    def named(self, name: str) -> Precision:
        """Another of ``PRECISIONS`` with what the user changed of this one."""
        return replace(
            PRECISIONS[name],
            chosen=self.chosen,
            moe_activations=self.moe_activations,
            kv_cache_dtype=self.kv_cache_dtype,
            weights_only=self.weights_only,
        )

    def options(self) -> dict[str, Any]:
        """The options of ``EngineConfig`` that give this precision: see ``make_precision``."""
        return {
            "precision": self.name,
            "layer_format": tuple(f"{layer}={fmt}" for layer, fmt in self.chosen),
            "moe_activations": self.moe_activations,
            "kv_cache_dtype": self.kv_cache_dtype,
        }

    @property
    def kv_format(self) -> str:
        """``bf16`` or ``fp8``; where activations travel as float32, ``bf16`` means that."""
        return self.kv if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    def option(self, layer: str) -> str:
        """The option that decides the format of a layer, as the user would write it."""
        name = layer.partition(".")[0]
        return f"--layer-format {name}={dict(self.chosen)[name]}" if name in dict(self.chosen) else self.plan_option

    @property
    def plan_option(self) -> str:
        return f"--precision {self.name}"

    def __str__(self) -> str:
        """The plan's name, then what differs from it."""
        parts = [self.name, *(f"{layer}={fmt}" for layer, fmt in self.chosen)]
        if self.moe_activations != "auto":
            parts.append(f"moe-activations={self.moe_activations}")
        if self.kv_cache_dtype != "auto":
            parts.append(f"kv-cache={self.kv_cache_dtype}")
        return ", ".join(parts)

    def check_layers(self, model: str, layers: Sequence[str]) -> None:
        """Refuse ``--layer-format`` of a layer that the model does not have."""
        there = {layer.partition(".")[0] for layer in layers} | {"embed"}
        for layer, fmt in self.chosen:
            if layer not in there:
                has = ", ".join(name for name in LAYERS if name in there)
                raise BadSetting(f"--layer-format {layer}={fmt}: {model} has no such layer; it has {has}.")


_DENSE = ("qkv", "o", "mlp", "lm_head")
_EXPERTS = ("experts", "mxfp8")
"""For those of BF16 checkpoints: what a block format holds already is narrower or the same."""
PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("exact"),
        Precision("balanced", (*((layer, "mxfp8") for layer in _DENSE), _EXPERTS), ("moe",)),
        Precision("fast", (*((layer, "mxfp4") for layer in _DENSE), _EXPERTS), ("moe", "dense"), True, kv="fp8"),
    )
}
EXACT = PRECISIONS["exact"]


def make_precision(
    name: str = "exact", layer_formats: Sequence[str] = (), moe_activations: str = "auto", kv_cache_dtype: str = "auto"
) -> Precision:
    """The record of ``--precision``, ``--layer-format``, ``--moe-activations`` and ``--kv-cache-dtype``."""
    one_of("--precision", name, PRECISION_NAMES)
    one_of("--moe-activations", moe_activations, MOE_ACTIVATIONS)
    one_of("--kv-cache-dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    chosen = parse_layer_formats(layer_formats)
    base = PRECISIONS.get(name, Precision(AUTO))
    return replace(base, chosen=tuple(chosen.items()), moe_activations=moe_activations, kv_cache_dtype=kv_cache_dtype)
