"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

MODEL_HELP = "demo (the embedded model), a checkpoint folder, a hub id (openai/gpt-oss-20b), or a preset"
PrecisionOption = Annotated[
    str, typer.Option(help="exact (the checkpoint's formats), balanced (8-bit dense layers) or fast (4-bit, FP8 KV).")
]
LayerFormatOption = Annotated[
    list[str] | None,
    typer.Option(
        help="LAYER=FORMAT with qkv, o, lm_head, embed, mlp or experts, and bf16, fp8, mxfp8 or mxfp4. Repeatable."
    ),
]
MoeActivationsOption = Annotated[str, typer.Option(help="Format of the experts' activations: auto, bf16 or mxfp8.")]
KvCacheDtypeOption = Annotated[str, typer.Option(help="Format of the KV cache: auto, bf16 or fp8.")]
UtilizationOption = Annotated[float, typer.Option(help="Share of the GPU's memory that may be used.")]
ReserveOption = Annotated[
    float | None,
    typer.Option(
        help="GiB to leave to the system where GPU and CPU share memory. Default: 8 on a GPU such as GB10.", min=0
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(help="CPU threads of every step. Default: one for small steps, all for large ones.", min=1),
]
TensorParallelOption = Annotated[
    int,
    typer.Option(
        help="Processes that share the model, each on its own GPU or all on the CPU: docs/parallel.md.", min=1
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


def reserve_in_bytes(reserve_memory: float | None) -> int | None:
    """``--reserve-memory`` in bytes."""
    return None if reserve_memory is None else int(reserve_memory * (1 << 30))
