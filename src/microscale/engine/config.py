"""The options of an engine, in the command line's names. The command line fills this record, the engine process gets it
as it is, and the loader reads it. Needs no torch.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from microscale.engine.speculation.config import SpeculativeConfig
from microscale.parallel.handshake import Nodes
from microscale.parallel.sharding import WHOLE, Shard

MAX_TEXT = 4096  # characters of one option

Natural = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**62)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What decides which engine is made."""

    model: Text
    load_format: Text = "auto"
    device: Text = "auto"
    """``auto`` (the first GPU, else the CPU), ``cpu``, ``cuda`` or ``cuda:1``."""
    dtype: Text = "auto"
    """Type of the activations: ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    backend: Text | None = None
    moe_backend: Text | None = None
    precision: Text = "exact"
    layer_format: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    moe_activations: Text = "auto"
    kv_cache_dtype: Text = "auto"
    hf_overrides: Annotated[dict[str, Any], Meta(max_length=256)] = {}
    max_model_len: Positive | None = None
    max_num_seqs: Positive | None = None
    """``None``: by the card's memory (``loading.memory.with_room``)."""
    max_num_batched_tokens: Positive = 2048
    max_queue: Positive = 1024
    prefix_caching: bool = True
    enforce_eager: bool = False
    gpu_memory_utilization: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.9
    reserve_memory: Natural | None = None  # bytes
    block_size: Positive = 16
    offline: bool = False
    seed: Natural = 0  # for dummy weights
    threads: Positive | None = None  # CPU threads of every step; ``None``: by its size
    tensor_parallel_size: Positive = 1
    """Ranks that share the model."""
    nodes: Nodes | None = None
    """The machines of the ranks; ``None``: all ranks are on this machine."""
    shard: Shard = WHOLE
    """Which rank this process is. Not an option: ranks get it from their team."""
    sharing: Positive = 1
    """Ranks that share this one's device. Not an option either."""
    allow_slow: bool = True
    """Run a model that makes less than half a token per second on this CPU. The command line asks for ``--yes``."""
    kernel_cache: Text | None = None
    """The folder of compiled kernels; ``None`` is Triton's own."""
    speculative: SpeculativeConfig | None = None
    """How tokens are drafted; ``None``: not at all."""
    drain_s: Seconds = 30.0
    """How long open requests may continue after SIGTERM."""
    vocabulary: Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=2**20)] = ()
    """The text of each token, control tokens by name. Only grammars need it."""
    control_tokens: Annotated[tuple[Token, ...], Meta(max_length=2**16)] = ()
    split_pattern: Text = ""
    """How the tokenizer splits text before it merges bytes."""
