"""The contract of ``recurrent``: Gated DeltaNet from its projections to what its output projection reads. The two gates
of a head are projected here too: their weights are few, and a launch of their own would cost more than the product.

A layer keeps, for each sequence, a matrix per value head (float32) and the last columns of its convolution. Both are in
a *slot*. A step reads a sequence's slot, runs its new tokens one after the other, and writes a slot:

    b, a = gates x                        for each value head
    c  = silu(conv(q, k, v))              a causal convolution of each channel over its last ``taps`` tokens
    q  = q / |q| / sqrt(key_dim)          k = k / |k|                 value head j uses q and k of head j // group
    S  = exp(-exp(a_log) · softplus(a + dt_bias)) · S
    u  = sigmoid(b) · (v - kᵀS)           the error of what the decayed state recalls
    S  = S + k ⊗ u                        o = qᵀS
    y  = norm(o) · norm_weight · silu(z)  a norm over each head

Where a sequence begins (its first new token has position 0), the state and the columns before it are zero, whatever the
slot holds. Slots that are read and written may be the same one, and need not: a slot that is only read stays as it is,
so it can be shared.

Columns are in a ring: the one of position p is at ``p % RING``. So a token writes over none that another token of a
decoding step reads, and drafts that were rejected are simply overwritten.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.kernels.op import Activations, Implementation, Path, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

DECODING = 256
RING = 8
"""Columns of the convolution that a slot holds: those that the next token reads, and room for the drafts of a step."""


@dataclass(frozen=True)
class StepShape:
    """What the host knows of a step before the op runs."""

    sequences: int
    longest: int
    """The most new tokens of any sequence."""
    verify: bool = False
    """Every sequence decodes with drafts: the state after each of its tokens goes to a slot of its own."""


@dataclass(frozen=True)
class RecurrentSpec:
    """One layer and the work that it is asked to do."""

    num_key_heads: int
    num_heads: int
    """Value heads: each has a state."""
    key_dim: int
    value_dim: int
    taps: int
    """Tokens that the convolution sees, the token itself included."""
    hidden: int
    """Width of a token, which the gates are projected from."""
    activations: Activations
    tokens: int
    """New tokens, over all sequences."""
    step: StepShape | None = None
    """``None`` where no step is known: up to ``DECODING`` tokens are as many sequences, more are a prompt."""

    @property
    def shape(self) -> StepShape:
        return self.step or (StepShape(self.tokens, 1) if self.tokens <= DECODING else StepShape(1, self.tokens))

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.num_heads // self.num_key_heads

    @property
    def channels(self) -> int:
        """Of the convolution: all of q, then k, then v."""
        return 2 * self.num_key_heads * self.key_dim + self.width

    @property
    def width(self) -> int:
        """Of a token's result."""
        return self.num_heads * self.value_dim

    @property
    def most_drafts(self) -> int:
        """Per sequence and step. Engines pad 1 + drafts to a power of two."""
        return (1 << (RING - self.taps + 1).bit_length() - 1) - 1

    @property
    def slot_bytes(self) -> int:
        return 4 * self.state_numbers + self.channels * RING * self.activations.itemsize

    @property
    def gate_numbers(self) -> int:
        """Weights that both gates of every head are projected with."""
        return 2 * self.num_heads * self.hidden

    @property
    def state_numbers(self) -> int:
        """Numbers of a slot's state, in float32."""
        return self.num_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class RecurrentWeights:
    """What a layer has next to its projections."""

    gates: Tensor  # [2 * heads, hidden]: b, a
    conv: Tensor  # [channels, taps], the token's own tap last
    decay: Tensor  # [heads] float32: -exp(a_log)
    dt_bias: Tensor  # [heads] float32
    norm: Tensor  # [value_dim]
    epsilon: float


@dataclass(frozen=True)
class StateCache:
    """The slots of one layer."""

    state: Tensor  # [slots, heads, key_dim, value_dim] float32
    columns: Tensor  # [slots, channels, RING], in the activations' type

    @classmethod
    def allocate(cls, spec: RecurrentSpec, num_slots: int, device: torch.device) -> StateCache:
        """Slots that hold anything: what a sequence reads it has written."""
        state = torch.empty(num_slots, spec.num_heads, spec.key_dim, spec.value_dim, device=device)
        columns = torch.empty(num_slots, spec.channels, RING, dtype=torch_dtype(spec.activations), device=device)
        return cls(state, columns)


@dataclass(frozen=True)
class StateBatch:
    """Which new tokens belong to which sequence, and where their states are. Read on the device by the kernels."""

    query_start: Tensor  # [sequences + 1] int32: new tokens of sequence s are query_start[s] to query_start[s + 1]
    context_lens: Tensor  # [sequences] int32: positions of s, the new tokens included
    read: Tensor  # [sequences] int32: the slot with the state before the new tokens
    write: Tensor  # [sequences, n] int32: the slot for the state after the last; with drafts, after each of n tokens
    max_query_len: int
    """The most new tokens of any sequence, known to the host."""
    verify: bool = False
    """The new tokens are each sequence's next one and drafts after it."""

    def __post_init__(self) -> None:
        assert self.query_start.is_contiguous()
        assert self.context_lens.is_contiguous()
        assert self.read.is_contiguous()

    @cached_property
    def shape(self) -> StepShape:
        """Read once for all layers."""
        return StepShape(self.context_lens.shape[0], self.max_query_len, self.verify)


@dataclass(frozen=True)
class RecurrentPath(Path[RecurrentSpec]):
    """One way to run the op."""

    start: Callable[[RecurrentSpec, Gpu, Tensor, Tensor, RecurrentWeights, StateCache, StateBatch], Tensor]


class RecurrentOp(Implementation[RecurrentSpec]):
    """There is nothing to pack."""

    op = "recurrent"
    layout = "checkpoint"
    paths: tuple[RecurrentPath, ...]

    def run(
        self,
        spec: RecurrentSpec,
        gpu: Gpu,
        projected: Tensor,
        x: Tensor,
        weights: RecurrentWeights,
        cache: StateCache,
        batch: StateBatch,
        path: RecurrentPath,
    ) -> Tensor:
        """``x [tokens, hidden]`` and ``projected [tokens, channels + width]``, its q, k, v and z → ``[tokens, width]``,
        and the states in the slots to write, by ``path``."""
        return path.start(spec, gpu, projected, x, weights, cache, batch)

    @abstractmethod
    def supports(self, spec: RecurrentSpec, gpu: Gpu) -> str | None: ...


def why_malformed(spec: RecurrentSpec) -> str | None:
    """Why no implementation runs the spec."""
    if spec.num_heads % spec.num_key_heads:
        return f"needs value heads that divide among key heads, not {spec.num_heads} over {spec.num_key_heads}"
    if spec.activations.narrow:
        return f"computes in float32, not with {spec.activations} activations"
    longest = spec.shape.longest if spec.shape.verify else 1
    if spec.taps - 1 + longest > RING:
        return f"keeps {RING} columns, too few for {spec.taps} taps and {longest - 1} drafts"
    return None
