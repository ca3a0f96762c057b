"""Options that several commands share, and the values that they turn into. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from microscale.errors import BadSetting
from microscale.models.config import LoadFormat
from microscale.models.json_object import parse_json

MODEL_HELP = "demo (the embedded model), a checkpoint folder, a hub id (openai/gpt-oss-20b), or a preset"
PlannedModelArgument = Annotated[
    str, typer.Argument(help="A preset (gpt-oss-120b, gemma-4-26b-a4b …), demo, a checkpoint folder or a hub id.")
]
CardOption = Annotated[
    str | None, typer.Option(help="A known card (h200, rtx5090, gb10 …). Default: this machine's GPU.")
]
PrecisionOption = Annotated[
    str,
    typer.Option(
        help="exact (the checkpoint's formats), balanced (8-bit dense layers) or fast (4-bit ones, FP8 KV cache)."
    ),
]
LayerFormatOption = Annotated[
    list[str] | None,
    typer.Option(
        help="LAYER=FORMAT: qkv, o, lm_head, embed, mlp or experts = bf16, fp8, mxfp8, mxfp4 or nvfp4. Repeatable."
    ),
]
MoeActivationsOption = Annotated[str, typer.Option(help="Format of the experts' activations: auto, bf16 or mxfp8.")]
KvCacheDtypeOption = Annotated[str, typer.Option(help="Format of the KV cache: auto, bf16 or fp8.")]
UtilizationOption = Annotated[float, typer.Option(help="Maximum share of the GPU's memory to use.")]
ReserveOption = Annotated[
    float | None,
    typer.Option(
        help="GiB to leave to the system if GPU and CPU share memory. Default: 8 on GB10 and its like.", min=0
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(help="Number of CPU threads. Default: 1 for steps with few tokens, all cores for others.", min=1),
]
TensorParallelOption = Annotated[
    int,
    typer.Option(
        help="Processes that share the model, each on its own GPU or all on the CPU (docs/parallel.md).", min=1
    ),
]
KernelCacheOption = Annotated[
    Path | None,
    typer.Option(help="The folder of compiled kernels. Default: TRITON_CACHE_DIR or ~/.triton/cache."),
]
SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        help='Draft tokens and verify them: \'{"method": "ngram", "num_speculative_tokens": 4}\', or by a draft head: '
        '\'{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3, "quantization": "mxfp8"}\', where '
        "quantization halves the bytes of the head's weights."
    ),
]
MoeBackendOption = Annotated[str | None, typer.Option(help="The implementation of the expert layers.")]
BackendOption = Annotated[
    str | None,
    typer.Option(help="Use this implementation wherever there is one of this name: reference, dequantized …"),
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
DtypeOption = Annotated[
    str, typer.Option(help="Format of activations: auto (bfloat16 on a GPU, float32 on a CPU), float32 or bfloat16.")
]
LoadFormatOption = Annotated[
    LoadFormat, typer.Option(help="dummy makes random weights in the model's shapes and needs no files.")
]
OverridesOption = Annotated[
    str | None, typer.Option(help="JSON that overrides keys of config.json: '{\"num_hidden_layers\": 2}'.")
]
BlockSizeOption = Annotated[int, typer.Option(help="Tokens in one page of the KV cache.", min=1)]


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
