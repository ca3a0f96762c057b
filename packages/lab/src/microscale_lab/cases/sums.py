"""Cases of sums over ranks: one rank's launch, after the others have sent theirs.

A kernel waits for all senders' flags, and here one runs at a time. So the others' rows and flags are laid into its
buffer before it starts, as their launches would have, and what it sends is looked for in theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from microscale.hardware import Gpu
from microscale.hardware.sums import PEER_ROW_BYTES, PEER_ROWS
from microscale.kernels.op import Reason
from microscale.kernels.sums import one_shot, reference
from microscale.kernels.sums.spec import DATA_AT, FLAG_BYTES, SENDERS, PeerBuffers, SumSpec
from microscale_lab.cases.case import Case, Compared, Finish, compare, same
from microscale_lab.cases.small import norm_of_sum_bound, normal

if TYPE_CHECKING:
    from torch import Tensor

POISON = 0x7F
"""In bytes that nobody has sent: a NaN in bf16, and as a flag far ahead."""
WRAPS = 2**31 - 1


def make_buffers(world: int, rows: int, device: str) -> tuple[Tensor, ...]:
    """Those of all ranks, as far as so many rows reach. Flags are zero."""
    size = DATA_AT + 2 * rows * world * PEER_ROW_BYTES
    made = tuple(torch.full((size,), POISON, dtype=torch.uint8, device=device) for _ in range(world))
    for buffer in made:
        buffer[:DATA_AT] = 0
    return made


def slot(buffer: Tensor, row: int, use: int, sender: int, world: int, like: Tensor) -> Tensor:
    """Where a sender puts a row ``like`` this one, in use ``use`` of the row's channel."""
    begin = DATA_AT + ((row * 2 + use % 2) * world + sender) * PEER_ROW_BYTES
    return buffer[begin : begin + like.nbytes].view(like.dtype)


def flag(buffer: Tensor, row: int, sender: int) -> Tensor:
    begin = (row * SENDERS + sender) * FLAG_BYTES
    return buffer[begin : begin + FLAG_BYTES].view(torch.int32)


def wrapped(use: int) -> int:
    """A count as 32 bits hold it."""
    return (use + 2**31) % 2**32 - 2**31


def send(buffer: Tensor, sender: int, world: int, part: Tensor, use: int) -> None:
    """What a sender's launch leaves in one rank's buffer."""
    for row, numbers in enumerate(part):
        slot(buffer, row, use, sender, world, numbers).copy_(numbers)
        flag(buffer, row, sender).fill_(wrapped(use))


@dataclass(frozen=True)
class SumCase(Case):
    spec: SumSpec
    rank: int
    use: int
    """Of its channels, from 1 on."""
    norm: bool = False

    @property
    def op(self) -> str:
        return "sums"

    def variant(self, gpu: Gpu) -> str:
        return "one shot, sum, add and norm" if self.norm else "one shot, sum"

    def refuses(self, gpu: Gpu) -> Reason | None:
        return one_shot.refuses(self.spec)

    def start(self, gpu: Gpu, device: str) -> Finish:
        spec, rank = self.spec, self.rank
        rows, width, world = spec.rows, spec.width, spec.world
        parts = [normal(rows, width, device=device, seed=1 + each, size=3.0).to(spec.dtype) for each in range(world)]
        buffers = make_buffers(world, rows, device)
        for sender, part in enumerate(parts):
            if sender != rank:
                # One that is ahead has set its flag once more, and has written to the other half.
                send(buffers[rank], sender, world, part, self.use)
                if sender % 2:
                    send(buffers[rank], sender, world, torch.full_like(part, torch.nan), self.use + 1)
        epochs = torch.full((PEER_ROWS,), wrapped(self.use - 1), dtype=torch.int32, device=device)
        before = [buffer.clone() for buffer in buffers]
        peers, residual = PeerBuffers(rank, buffers, epochs), normal(rows, width, device=device, seed=20)
        weight = normal(width, device=device, seed=21)
        if self.norm:
            out, total = one_shot.sum_add_norm(peers, parts[rank], residual, weight, 1e-5)
        else:
            out = total = one_shot.sum_rows(peers, parts[rank])

        def finish() -> Iterator[Compared]:
            if self.norm:
                want, want_total = reference.sum_add_norm(parts, residual, weight, 1e-5)
                yield compare("norm", out, want, norm_of_sum_bound(want))
            else:
                want_total = reference.sum_rows(parts)
            yield same("sum", total, want_total)
            for place, (buffer, old) in enumerate(zip(buffers, before, strict=True)):
                send(old, rank, world, parts[rank], self.use)  # what it sent, and nothing else
                yield same(f"what rank {place} holds", buffer, old)
            counted = torch.full_like(epochs, wrapped(self.use - 1))
            counted[:rows] = wrapped(self.use)
            yield same("uses", epochs, counted)

        return finish


def cases() -> Iterator[Case]:
    bf16, float32 = torch.bfloat16, torch.float32
    for world, rank in ((2, 0), (2, 1), (4, 2), (8, 7)):
        yield SumCase(f"{world} ranks, rank {rank}, 2880 columns", SumSpec(2, 2880, bf16, world), rank, 1)
        yield SumCase(f"{world} ranks, rank {rank}, with norm", SumSpec(2, 2880, bf16, world), rank, 2, norm=True)
    yield SumCase("odd columns", SumSpec(3, 161, bf16, 2), 1, 4)
    yield SumCase("odd columns, with norm", SumSpec(3, 161, bf16, 2), 0, 3, norm=True)
    yield SumCase("float32 of few columns", SumSpec(3, 4, float32, 2), 0, 5)
    yield SumCase("the last count before it wraps", SumSpec(1, 64, bf16, 2), 0, WRAPS)
    yield SumCase("a count that wraps", SumSpec(1, 64, bf16, 4), 3, WRAPS + 1)
    yield SumCase("the widest row, as many as there are", SumSpec(PEER_ROWS, 16384, bf16, 2), 0, 1, large=True)
