"""Steps of the recurrent op, made at random, and how an implementation is held against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from microscale.kernels.op import Activations, torch_dtype
from microscale.kernels.recurrent.spec import RING, RecurrentSpec, RecurrentWeights, StateBatch, StateCache, StepShape

if TYPE_CHECKING:
    from torch import Tensor

TINY = RecurrentSpec(2, 4, 32, 32, 4, Activations.FLOAT32, tokens=1)


def make_weights(spec: RecurrentSpec, seed: int = 0, device: str = "cpu") -> RecurrentWeights:
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    dtype = torch_dtype(spec.activations)
    return RecurrentWeights(
        (normal(spec.channels, spec.taps) / 2).to(device, dtype),
        -normal(spec.num_heads).exp().to(device),
        normal(spec.num_heads).to(device),
        (1 + normal(spec.value_dim) / 4).to(device),
        1e-6,
    )


def make_tokens(spec: RecurrentSpec, count: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """``projected`` and ``gates``."""
    chance = torch.Generator().manual_seed(1000 + seed)
    shapes = (count, spec.channels + spec.width), (count, 2 * spec.num_heads)
    projected, gates = (torch.randn(shape, generator=chance) for shape in shapes)
    dtype = torch_dtype(spec.activations)
    return projected.to(device, dtype), gates.to(device, dtype)


def make_cache(spec: RecurrentSpec, slots: int, seed: int = 0, device: str = "cpu") -> StateCache:
    """Slots that hold something already."""
    chance = torch.Generator().manual_seed(2000 + seed)
    state = torch.randn(slots, spec.num_heads, spec.key_dim, spec.value_dim, generator=chance)
    columns = torch.randn(slots, spec.channels, RING, generator=chance)
    return StateCache(state.to(device), columns.to(device, torch_dtype(spec.activations)))


def make_batch(
    firsts: Sequence[int], counts: Sequence[int], read: Sequence[int], write: Sequence[Sequence[int]],
    device: str = "cpu", *, verify: bool = False,
) -> StateBatch:  # fmt: skip
    """``firsts``: positions of each sequence's first new token."""

    def ints(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    starts = ints([0, *accumulate(counts)])
    lens = ints([first + count for first, count in zip(firsts, counts, strict=True)])
    slots = torch.tensor(write, dtype=torch.int32, device=device)
    return StateBatch(starts, lens, ints(read), slots, max(counts), verify)


def spec_of(spec: RecurrentSpec, batch: StateBatch, tokens: int) -> RecurrentSpec:
    shape = batch.shape
    return replace(spec, tokens=tokens, step=StepShape(shape.sequences, shape.longest, shape.verify))
