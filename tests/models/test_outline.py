"""What is recorded of a model is what the loaded model binds, holds, caches and runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from microscale.hardware import cpu
from microscale.models.config import LayerKind
from microscale.models.embedded import embedded_folder
from microscale.models.families import (
    PRESETS,
    ModelConfig,
    build_model,
    dummy_weights,
    read_model_config,
)
from microscale.models.gemma4.config import LayerFormats
from microscale.models.outline import Outline, in_order, outline
from microscale.planning.ops import (
    Activations,
    Attention,
    Dense,
    DenseSpec,
    Moe,
    MoeSpec,
    Ops,
    PagedKv,
    Preference,
    StateCache,
    Use,
)
from microscale.planning.precision import make_precision
from support.families import gemma4_preset
from support.forward import last_logits

CPU = torch.device("cpu")
PAGE_SIZE = 16
GEMMA = gemma4_preset("gemma-4-tiny")
BF16, MXFP8 = LayerFormats.all("bf16"), LayerFormats.all("mxfp8")
CONFIGS: dict[str, ModelConfig] = {
    **{name: config for name, config in PRESETS.items() if name.endswith("tiny")},
    "demo": read_model_config(embedded_folder()),
    "in bf16": replace(GEMMA, formats=(BF16,) * 6),
    "ends in bf16": replace(GEMMA, formats=(BF16, *(MXFP8,) * 4, BF16)),
    "one part in bf16": replace(GEMMA, formats=(*(MXFP8,) * 5, replace(MXFP8, o="bf16"))),
    "untied": replace(GEMMA, tied=False),
}


def recorded(name: str, activations: Activations = Activations.FLOAT32) -> Outline:
    return outline(name, CONFIGS[name], activations, PAGE_SIZE, CONFIGS[name].max_context)


class Spy(Ops):
    """Binds everything, and keeps the names under which it did."""

    def __init__(self) -> None:
        # BF16 experts run in no format of their own.
        super().__init__(cpu(), Activations.FLOAT32, Preference(), make_precision(layer_formats=["experts=mxfp8"]))
        self.bound: Counter[tuple[str, str]] = Counter()
        self.names: dict[int, str] = {}

    def keep(self, op: str, layer: str, bound: Any) -> Any:
        self.bound[op, layer] += 1
        self.names[id(bound)] = layer
        return bound

    def experts(self, layer: str, *args: Any, **options: Any) -> Any:
        return self.keep("moe", layer, super().experts(layer, *args, **options))

    def dense(self, layer: str, *args: Any, **options: Any) -> Any:
        return self.keep("dense", layer, super().dense(layer, *args, **options))

    def attention(self, layer: str, *args: Any, **options: Any) -> Any:
        return self.keep("attention", layer, super().attention(layer, *args, **options))

    def recurrent(self, layer: str, *args: Any, **options: Any) -> Any:
        return self.keep("recurrent", layer, super().recurrent(layer, *args, **options))

    def small(self, spec: Any, layer: str = "small") -> Any:
        return self.keep("small", layer, super().small(spec, layer))

    def sampling(self, vocab: int) -> Any:
        return self.keep("sampling", "sampling", super().sampling(vocab))


def load(name: str, ops: Ops) -> Any:
    return build_model(dummy_weights(CONFIGS[name]), ops, CPU, PAGE_SIZE, lambda: None)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_recorded_is_what_is_bound(name: str) -> None:
    ops = Spy()
    load(name, ops)
    uses = recorded(name).uses
    assert {(use.op, use.layer): use.count for use in uses} == ops.bound
    for use in uses:
        spec = ops.plan.of(use.op, use.layer)[0].spec
        assert replace(spec, tokens=1) == ops.precision.applied(use.layer, use.spec)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_recorded_as_cached_is_the_cache(name: str) -> None:
    cache = load(name, Spy()).new_cache(dict.fromkeys(LayerKind, 1))
    states = [layer for layer in cache.layers if isinstance(layer, StateCache)]
    assert recorded(name).state_bytes == sum(layer.state.nbytes + layer.columns.nbytes for layer in states)
    paged = [layer for layer in cache.layers if isinstance(layer, PagedKv)]
    held = sum(pages.numel() for layer in paged for pages in (layer.k, layer.v))
    cached = recorded(name).cached
    assert sum(layers.numbers_per_position() for layers in cached) * PAGE_SIZE == held
    assert sum(layers.count for layers in cached) == len(paged)
    assert len(states) + len(paged) == CONFIGS[name].num_layers
    for layers in cached:
        assert layers.window == (CONFIGS[name].sliding_window if layers.kind is LayerKind.SLIDING else None)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_layer_runs_for_tokens_with_logits_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From attention on, which is what predictions take for it."""
    ops, seen = Spy(), set[tuple[str, int]]()

    def watched(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(self: object, x: torch.Tensor, *args: Any) -> Any:
            seen.add((ops.names[id(self)], x.shape[0]))
            return run(self, x, *args)

        return wrapper

    for kind, method in ((Dense, "__call__"), (Dense, "logits"), (Moe, "__call__"), (Attention, "__call__")):
        monkeypatch.setattr(kind, method, watched(getattr(kind, method)))
    last_logits(load(name, ops), [[1, 2, 3, 4, 5]], chunk=5, wanted=1)
    assert {layer for layer, tokens in seen if tokens == 1} | {"sampling"} == recorded(name).closing


def test_what_no_op_holds_by_hand() -> None:
    def other(model: str) -> int:
        return outline(model, PRESETS[model], Activations.BF16, PAGE_SIZE, 4096).other_bytes

    # Two norms, the sinks and the router with its bias in each layer, and the last norm.
    assert other("gpt-oss-20b") == 2 * (49 * 2880 + 24 * (64 + 32 * 2881))
    # Seven norms, the router and its scale, the norms of both heads; the scales of experts are float32.
    heads = 25 * 2 * 256 + 5 * 2 * 512
    assert other("gemma-4-26b-a4b") == 2 * (30 * 8 * 2816 + 2816 + heads + 30 * 128 * (2816 + 2))
    # Two norms and the router in each layer, the last norm; of those with states the gates, the convolution, the norm
    # and two numbers of each head, of the others the norms of both heads.
    states = 30 * (2 * (64 * 2048 + 8192 * 4 + 128) + 32 * (4 + 4))
    assert other("qwen3.6-35b-a3b") == 2 * (40 * (2 + 257) * 2048 + 2048 + 10 * 2 * 256) + states


@pytest.mark.parametrize("name", CONFIGS)
def test_the_rest_is_the_configs(name: str) -> None:
    config, found = CONFIGS[name], recorded(name)
    assert found.name == name
    assert (found.vocab_size, found.hidden, found.max_context) == (config.vocab_size, config.hidden, config.max_context)
    assert found.tied == getattr(config, "tied", False)
    assert recorded(name, Activations.BF16).other_bytes == found.other_bytes
    seen = outline(name, config, Activations.BF16, PAGE_SIZE, 123)
    assert {use.spec.context for use in seen.uses if use.op == "attention"} == {123}


def use(op: str, layer: str, fmt: str = "bf16") -> Use:
    specs: dict[str, Any] = {"dense": DenseSpec(64, 32, fmt, Activations.BF16, False, tokens=1)}
    return Use(op, layer, specs.get(op))


def test_uses_are_listed_part_by_part_and_kind_by_kind() -> None:
    first = [use("dense", "qkv"), use("attention", "a"), use("dense", "o")]
    layers = [
        first,
        [use("dense", "qkv"), use("attention", "b"), use("dense", "o")],
        [use("dense", "qkv.mxfp8", "mxfp8"), use("attention", "a"), use("dense", "o.mxfp8", "mxfp8")],
        first,
        [use("dense", "lm_head")],
    ]
    listed = {found.layer: found.count for found in in_order(layers)}
    assert list(listed.items()) == [
        ("qkv", 3),
        ("qkv.mxfp8", 1),
        ("a", 3),
        ("b", 1),
        ("o", 3),
        ("o.mxfp8", 1),
        ("lm_head", 1),
    ]


def test_one_name_for_layers_that_differ_is_refused() -> None:
    with pytest.raises(AssertionError, match="qkv names layers that differ"):
        in_order([[use("dense", "qkv")], [use("dense", "qkv", "mxfp8")]])


def test_formats_of_a_checkpoint_have_names_of_their_own() -> None:
    uses = {found.layer: found for found in recorded("ends in bf16").uses}
    assert (uses["experts"].count, uses["experts.mxfp8"].count) == (2, 4)
    assert isinstance(uses["experts"].spec, MoeSpec)
    assert uses["experts"].spec.weight_format == "bf16"
    assert uses["qkv.sliding-mxfp8"].count == 4
    assert uses["qkv.full"].count == 1
