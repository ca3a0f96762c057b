"""What the op must at least move and compute, by counting."""

from __future__ import annotations

from microscale.kernels.recurrent.spec import RecurrentSpec


def recurrent_bytes(spec: RecurrentSpec) -> int:
    """A state is read once and written once for each sequence, and after each token of drafts; projections and results
    once for each token."""
    shape = spec.shape
    written = spec.tokens if shape.verify else shape.sequences
    gates = spec.gate_numbers * spec.activations.itemsize
    row = (spec.channels + 2 * spec.width + spec.hidden) * spec.activations.itemsize
    columns = spec.taps * spec.channels * spec.activations.itemsize
    return (shape.sequences + written) * (4 * spec.state_numbers + columns) + spec.tokens * row + gates


def recurrent_flops(spec: RecurrentSpec) -> int:
    """Recalling, writing and reading the state: two operations for each of its numbers, three times."""
    return 2 * spec.tokens * (3 * spec.state_numbers + spec.channels * spec.taps + spec.gate_numbers)
