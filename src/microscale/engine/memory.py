"""What a model takes, before it is loaded: a start that cannot fit says so at once."""

from __future__ import annotations

from microscale import hardware
from microscale.backends.ops import Gate, GateKind, Ops
from microscale.errors import Unsupported
from microscale.hardware import GIB
from microscale.models.config import GptOssConfig


def weight_bytes(config: GptOssConfig, ops: Ops) -> int:
    """Bytes of all weights in the layouts that the oracle will choose."""
    gate = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
    sizes = (config.num_experts, config.top_k, config.hidden, config.intermediate)
    layer = ops.packed_bytes("moe", ops.moe_spec(*sizes, weight_format="mxfp4", gate=gate, bias=True))
    attended = config.num_heads * config.head_dim
    for rows, columns in (
        (config.qkv_rows, config.hidden),
        (config.hidden, attended),
        (config.num_experts, config.hidden),
    ):
        layer += ops.packed_bytes("dense", ops.dense_spec(rows, columns, bias=True))
    embed = 2 * config.vocab_size * config.hidden
    lm_head = ops.packed_bytes("dense", ops.dense_spec(config.vocab_size, config.hidden))
    return config.num_layers * layer + embed + lm_head


def check_fits(config: GptOssConfig, ops: Ops, index: int = 0) -> None:
    """Refuse a model whose weights alone are more than the memory that is free."""
    needed, free = weight_bytes(config, ops), hardware.available_memory(ops.gpu, index)
    if needed <= free:
        return
    mend = "use a machine with more memory"
    if ops.gpu.is_cpu and ops.wish.backend != "reference":
        mend = "--backend reference keeps the experts in four bits, at the price of decoding them on every step"
    raise Unsupported(
        f"The weights take {needed / GIB:.1f} GiB and {free / GIB:.1f} GiB of {ops.gpu.name} memory are free; {mend}."
    )
