"""Cases of ``recurrent``: steps made at random, with states from slot to slot, and what they may differ from the truth.

Slots of sequences that begin hold NaN, and so do rows behind the tokens. All slots are compared, written or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import torch

from microscale.hardware import Gpu
from microscale.kernels.op import Activations, torch_dtype
from microscale.kernels.recurrent.gated_delta import TritonRecurrent, short_len
from microscale.kernels.recurrent.reference import recurrent
from microscale.kernels.recurrent.spec import (
    RING,
    RecurrentOp,
    RecurrentSpec,
    RecurrentWeights,
    StateBatch,
    StateCache,
    StepShape,
)
from microscale_lab.cases.case import Compared, Finish, OracleCase, compare, just_written, same
from microscale_lab.cases.errors import Errors, rms_step, spread, step

if TYPE_CHECKING:
    from torch import Tensor

TINY = RecurrentSpec(2, 4, 32, 32, 4, 96, Activations.FLOAT32, tokens=1)
WIDE = RecurrentSpec(1, 2, 128, 128, 4, 128, Activations.BF16, tokens=1)
QWEN36 = RecurrentSpec(16, 32, 128, 128, 4, 2048, Activations.BF16, tokens=1)
F16_STEP = 2.0**-11


def make_weights(spec: RecurrentSpec, seed: int = 0, device: str = "cpu") -> RecurrentWeights:
    chance = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance)

    dtype = torch_dtype(spec.activations)
    return RecurrentWeights(
        (normal(2 * spec.num_heads, spec.hidden) * spec.hidden**-0.5).to(device, dtype),
        (normal(spec.channels, spec.taps) / 2).to(device, dtype),
        -normal(spec.num_heads).exp().to(device),
        normal(spec.num_heads).to(device),
        (1 + normal(spec.value_dim) / 4).to(device),
        1e-6,
    )


def make_tokens(spec: RecurrentSpec, count: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """``projected`` and ``x``."""
    chance = torch.Generator().manual_seed(1000 + seed)
    shapes = (count, spec.channels + spec.width), (count, spec.hidden)
    projected, x = (torch.randn(shape, generator=chance) for shape in shapes)
    dtype = torch_dtype(spec.activations)
    return projected.to(device, dtype), x.to(device, dtype)


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


def rounded_in_chunks(expected: Tensor) -> Errors:
    """Products with float16 operands in every sum: about one rounding's error was seen (``chunks_jit``), and two are
    allowed. ``worst`` has twice that, for answers that are small next to what they are the sum of."""
    return Errors(4 * F16_STEP * spread(expected), 2 * F16_STEP)


def float32_bound(expected: Tensor) -> Errors:
    """A few dozen operations, among them exponentials that a GPU has within two steps, and sums of a head's numbers."""
    return Errors(64 * step("float32") * spread(expected), 64 * step("float32"))


def output_bound(expected: Tensor, activations: Activations, chunks: bool) -> Errors:
    """Both compute from the same numbers and the kernel rounds once."""
    parts = [rounded_in_chunks(expected) if chunks else float32_bound(expected)]
    if activations is Activations.BF16:
        parts.append(Errors(2 * step("bf16") * spread(expected), 2 * rms_step("bf16")))
    return Errors(sum(part.worst for part in parts), sum(part.rms for part in parts))


def state_bound(expected: Tensor, chunks: bool) -> Errors:
    return rounded_in_chunks(expected) if chunks else float32_bound(expected)


@dataclass(frozen=True)
class RecurrentCase(OracleCase):
    layer: RecurrentSpec
    firsts: tuple[int, ...]
    counts: tuple[int, ...]
    read: tuple[int, ...]
    write: tuple[tuple[int, ...], ...]
    verify: bool = False
    equal_keys: bool = False
    """The input on which chunks lose most."""

    op: ClassVar[str] = "recurrent"

    @property
    def entry(self) -> RecurrentOp:
        return TritonRecurrent()

    @property
    def spec(self) -> RecurrentSpec:
        shape = StepShape(len(self.counts), max(self.counts), self.verify)
        return replace(self.layer, tokens=sum(self.counts), step=shape)

    def start(self, gpu: Gpu, device: str) -> Finish:
        spec, tokens = self.spec, sum(self.counts)
        slots = 1 + max(*self.read, *map(max, self.write))
        weights = make_weights(spec, device=device)
        ours, exact = (make_cache(spec, slots, device=device) for _ in range(2))
        for cache in (ours, exact):
            for first, slot in zip(self.firsts, self.read, strict=True):
                if first == 0:
                    cache.state[slot], cache.columns[slot] = math.nan, math.nan
        projected, x = make_tokens(spec, tokens + 1, device=device)
        projected[tokens], x[tokens] = math.nan, math.nan
        if self.equal_keys:
            keys = spec.num_key_heads * spec.key_dim
            projected[:tokens, keys : 2 * keys] = 2.0 + projected[:tokens, keys : 2 * keys] / 8
        given = projected[:tokens], x[:tokens]
        batch = make_batch(self.firsts, self.counts, self.read, self.write, device, verify=self.verify)
        just_written(*given)
        out = self.entry.run(spec, gpu, *given, weights, ours, batch, self.path(gpu))

        def finish() -> Iterator[Compared]:
            want = recurrent(*given, weights, exact, batch, spec)
            starts = [0, *accumulate(self.counts)]
            for seq, count in enumerate(self.counts):
                chunks = count > short_len(spec)
                found, right = (x[starts[seq] : starts[seq + 1]] for x in (out, want))
                yield compare(f"outputs of {seq}", found, right, output_bound(right, spec.activations, chunks))
            written = {
                slot: count > short_len(spec)
                for count, slots in zip(self.counts, self.write, strict=True)
                for slot in slots[: count if self.verify else min(count, 1)]
            }
            for slot in range(slots):
                found, right = ours.state[slot], exact.state[slot]
                if slot in written:
                    yield compare(f"state {slot}", found, right, state_bound(right, written[slot]))
                else:
                    yield same(f"state {slot}", found, right)
            yield same("columns", ours.columns, exact.columns)

        return finish


def _apart(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple((slot,) for slot in range(count))


def cases() -> Iterator[RecurrentCase]:
    bf16 = replace(TINY, activations=Activations.BF16)
    for name, layer in (("float32", TINY), ("bf16", bf16), ("heads of 128", WIDE)):
        three = (0, 1, 2)
        yield RecurrentCase(f"decode, {name}", layer, (5, 0, 9), (1, 1, 1), three, ((0,), (3,), (2,)))
        yield RecurrentCase(f"few tokens, {name}", layer, (5, 7, 0, 1), (4, 0, 5, 2), (0, 1, 2, 4), _apart(4))
        drafts = (0, 3, 4, 5), (6, 2, 7, 1)
        yield RecurrentCase(f"drafts, {name}", layer, (5, 2), (4, 4), (0, 2), drafts, verify=True)
        yield RecurrentCase(f"a prompt, {name}", layer, (0,), (130,), (0,), ((0,),))
        mixed = (5, 0, 9, 1, 2), (1, 65, 63, 6, 0), (0, 1, 2, 4, 5), ((0,), (3,), (2,), (6,), (5,))
        yield RecurrentCase(f"prompts and others, {name}", layer, *mixed)
    for count in (6, 63, 64, 65, 128):
        yield RecurrentCase(f"{count} tokens after others", bf16, (3,), (count,), (1,), ((0,),))
    yield RecurrentCase("a sequence's second token", bf16, (1, 2), (1, 6), (0, 1), ((0,), (1,)))
    yield RecurrentCase("keys alike", WIDE, (0,), (192,), (0,), ((0,),), equal_keys=True)
    slots = tuple(range(64))
    yield RecurrentCase("64 sequences", QWEN36, (100,) * 64, (1,) * 64, slots, _apart(64), large=True)
    yield RecurrentCase("long prompt", QWEN36, (0, 77), (2048, 1), (0, 1), _apart(2), large=True)
