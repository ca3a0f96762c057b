"""Options that several commands share, and the values that they turn into. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from microscale.cli.help import (
    device_option,
    gpus_option,
    memory_option,
    model_option,
    precision_option,
    speculation_option,
)
from microscale.errors import BadSetting
from microscale.models.config import LoadFormat
from microscale.models.json_object import parse_json
from microscale.planning.option_values import (
    KV_CACHE_DTYPES,
    LAYER_FORMATS,
    LAYERS,
    MOE_ACTIVATIONS,
    PRECISION_NAMES,
    one_of,
    parse_layer_formats,
)


def choices(option: str, known: Sequence[str]) -> dict[str, Any]:
    """The arguments of an option that takes one of these words. A wrong one is refused before torch is imported."""
    return {
        "metavar": "|".join(known),
        "callback": lambda value: value if value is None else one_of(option, value, known),
    }


def check_layer_formats(value: Any) -> Any:
    parse_layer_formats(value or ())
    return value


def check_device(value: Any) -> Any:
    if value is not None and not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,3})?", value, re.ASCII):
        raise BadSetting(f"Unknown device {value[:80]!r}; use auto, cpu, cuda or cuda:N.")
    return value


MODEL_HELP = "demo (the embedded model), a checkpoint folder, a hub id (openai/gpt-oss-20b), or a preset"
PlannedModelArgument = Annotated[
    str, typer.Argument(help="A preset (gpt-oss-20b, gemma-4-26b-a4b-nvfp4 …), demo, a checkpoint folder or a hub id.")
]
CardOption = Annotated[
    str | None, model_option(metavar="CARD", help="A known card (h200, rtx5090, gb10 …). Default: this machine's GPU.")
]
PrecisionOption = Annotated[
    str,
    precision_option(
        **choices("--precision", PRECISION_NAMES),
        help="exact (the checkpoint's formats), balanced (8-bit dense layers), fast (4-bit ones, FP8 KV cache), or "
        "auto: the fastest whose measured cost in quality is small. No published model was measured yet, so auto stays "
        "with exact for them.",
    ),
]
LayerFormatOption = Annotated[
    list[str] | None,
    precision_option(
        metavar="LAYER=FORMAT",
        callback=check_layer_formats,
        help=f"Hold one kind of layer ({', '.join(LAYERS)}) in one format ({', '.join(LAYER_FORMATS)}). Repeatable.",
    ),
]
MoeActivationsOption = Annotated[
    str, precision_option(**choices("--moe-activations", MOE_ACTIVATIONS), help="Format of the experts' activations.")
]
KvCacheDtypeOption = Annotated[
    str, precision_option(**choices("--kv-cache-dtype", KV_CACHE_DTYPES), help="Format of the KV cache.")
]
UtilizationOption = Annotated[float, memory_option(help="Maximum share of the GPU's memory to use.", min=0.01, max=1.0)]
ReserveOption = Annotated[
    float | None,
    memory_option(
        help="GiB to leave to the system if GPU and CPU share memory. Default: 8 on GB10 and its like.", min=0
    ),
]
ThreadsOption = Annotated[
    int | None,
    device_option(
        help="Number of CPU threads. Default: 1 for steps with few tokens, all cores for others.", min=1, max=1024
    ),
]
TensorParallelOption = Annotated[
    int,
    gpus_option(
        help="Processes that share the model, each on its own GPU or all on the CPU (docs/parallel.md).", min=1
    ),
]
KernelCacheOption = Annotated[
    Path | None,
    device_option(help="The folder of compiled kernels. Default: TRITON_CACHE_DIR or ~/.triton/cache."),
]
SpeculativeOption = Annotated[
    str | None,
    speculation_option(
        metavar="JSON",
        help='Draft and verify tokens: n-grams \'{"method": "ngram", "num_speculative_tokens": 4}\', the MTP layer of '
        'Qwen3.6 \'{"method": "mtp", "num_speculative_tokens": 3}\', or a draft head '
        '\'{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3, "quantization": "mxfp8"}\', where '
        "quantization halves the bytes of the head's weights.",
    ),
]
MoeBackendOption = Annotated[str | None, device_option(metavar="NAME", help="The implementation of the expert layers.")]
BackendOption = Annotated[
    str | None,
    device_option(
        metavar="NAME", help="Use this implementation wherever there is one of this name: reference, dequantized …"
    ),
]
DeviceOption = Annotated[
    str,
    device_option(
        metavar="auto|cpu|cuda|cuda:N", callback=check_device, help="Where to run. auto is the first GPU, or the CPU."
    ),
]
YesOption = Annotated[
    bool,
    device_option("--yes", help="Run a model on the CPU even if it makes less than half a token per second."),
]
DtypeOption = Annotated[
    str,
    precision_option(
        **choices("--dtype", ("auto", "float32", "bfloat16")),
        help="Format of activations. auto is bfloat16 on a GPU and float32 on a CPU.",
    ),
]
LoadFormatOption = Annotated[
    LoadFormat, model_option(help="dummy makes random weights in the model's shapes and needs no files.")
]
OverridesOption = Annotated[
    str | None, model_option(metavar="JSON", help="Override keys of config.json: '{\"num_hidden_layers\": 2}'.")
]
BlockSizeOption = Annotated[int, memory_option(help="Tokens in one page of the KV cache.", min=1)]


def reserve_in_bytes(reserve_memory: float | None) -> int | None:
    """``--reserve-memory`` in bytes."""
    return None if reserve_memory is None else int(reserve_memory * (1 << 30))


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
