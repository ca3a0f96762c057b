"""What an expert layer must at least read and compute, by counting."""

from __future__ import annotations

from microscale.formats import block_format
from microscale.kernels.moe.spec import MoeSpec


def expected_experts(spec: MoeSpec) -> float:
    """How many experts are used by ``tokens`` tokens that spread evenly: E * (1 - (1 - k/E)**tokens)."""
    miss = 1 - spec.top_k / spec.num_experts
    return spec.num_experts * (1 - miss**spec.tokens)


def weights_per_expert(spec: MoeSpec) -> int:
    """Elements of one expert: gate, up and down."""
    return 3 * spec.hidden * spec.intermediate


def bytes_per_expert(spec: MoeSpec) -> int:
    """Bytes of one expert in the checkpoint's format, biases included."""
    rows, fmt = 2 * spec.intermediate + spec.hidden, block_format(spec.weight_format)
    per_row = 2 * spec.bias + fmt.row_bytes
    return weights_per_expert(spec) // fmt.block * fmt.bytes_per_block + rows * per_row


def expert_weight_bytes(spec: MoeSpec) -> int:
    """Bytes of all experts that the tokens are expected to use, read once each."""
    return round(expected_experts(spec) * bytes_per_expert(spec))


def activation_bytes(spec: MoeSpec) -> int:
    """Bytes of the tokens in and out and of the activations between the two GEMMs, in two-byte numbers."""
    rows = spec.tokens * spec.top_k
    return 2 * (2 * spec.tokens * spec.hidden + 2 * rows * spec.intermediate)


def expert_flops(spec: MoeSpec) -> int:
    """Multiply-adds of the two GEMMs, counted as two operations."""
    return 2 * spec.tokens * spec.top_k * weights_per_expert(spec)
