"""Options of every command that loads a model, and the load itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from microscale.cli.console import progress_bar
from microscale.engine.load import LoadOptions, load_model
from microscale.errors import BadSetting
from microscale.models.gpt_oss import GptOss
from microscale.models.gpt_oss_weights import GptOssWeights
from microscale.models.json_object import parse_json

PrecisionOption = Annotated[
    str, typer.Option(help="exact (the checkpoint's formats), balanced (8-bit dense layers) or fast (4-bit, FP8 KV).")
]
LayerFormatOption = Annotated[
    list[str] | None,
    typer.Option(help="LAYER=FORMAT: qkv, o, lm_head, embed, mlp, experts = bf16, fp8, mxfp8, mxfp4. Repeatable."),
]
MoeActivationsOption = Annotated[str, typer.Option(help="Activations that meet the experts: auto, bf16 or mxfp8.")]
KvCacheDtypeOption = Annotated[str, typer.Option(help="The KV cache's numbers: auto, bf16 or fp8.")]
UtilizationOption = Annotated[float, typer.Option(help="The part of the GPU's memory that may be used.")]
MoeBackendOption = Annotated[str | None, typer.Option(help="The implementation of the expert layers.")]


def parse_overrides(text: str | None) -> dict[str, object]:
    """The JSON object of ``--hf-overrides``."""
    if text is None:
        return {}
    try:
        value = parse_json(text.encode())
    except ValueError as error:
        raise BadSetting(
            f"--hf-overrides is not JSON ({error}); use for instance '{{\"num_hidden_layers\": 2}}'."
        ) from None
    if not isinstance(value, dict):
        raise BadSetting("--hf-overrides takes a JSON object, for instance '{\"num_hidden_layers\": 2}'.")
    return value


def load_with_progress(options: LoadOptions, on_open: Callable[[GptOssWeights], None]) -> GptOss:
    """Load a model and show each layer as it comes. ``on_open`` hears the checked weights before anything is loaded."""
    with progress_bar(f"Loading {options.model}") as (start, advance):

        def opened(weights: GptOssWeights) -> None:
            on_open(weights)
            start(weights.config.num_layers)

        return load_model(options, opened, on_layer=lambda: advance(1))
