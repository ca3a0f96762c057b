"""Cases of the kernels between two steps with drafts. All numbers are integers and must equal the reference's.

Where the next step is laid out, rows after its own and unused tables hold ``POISON``: it must stay there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar

import torch

from microscale.hardware import Gpu
from microscale.kernels.drafts import follow, reference
from microscale.kernels.drafts.spec import NO_TOKEN, Followed, Layout, Pages, Standing
from microscale.kernels.op import Reason
from microscale_lab.cases.case import Compared, Finish, KernelCase, just_written, same

if TYPE_CHECKING:
    from torch import Tensor

POISON = -(2**40)
VOCAB = 5
"""So few that drafts are often what is drawn."""


def layout_of(lengths: Sequence[int], device: str) -> Layout:
    longest = max(lengths)
    firsts = list(accumulate((1 + length for length in lengths[:-1]), initial=0))
    owners = [at for at, length in enumerate(lengths) for _ in range(1 + length)]
    sources: list[int] = []
    for at, length in enumerate(lengths):
        begin = len(lengths) + at * longest
        sources += [at, *range(begin, begin + length)]
    places = torch.arange(longest, device=device)
    first_rows, count, owner, source = (
        torch.tensor(each, device=device) for each in (firsts, lengths, owners, sources)
    )
    drawn = first_rows[:, None] + torch.minimum(places, count[:, None])
    return Layout(first_rows, count, owner, source, drawn, places < count[:, None])


def tokens_of(chance: random.Random, rows: int, columns: int, device: str) -> Tensor:
    found = [[chance.randrange(VOCAB) for _ in range(columns)] for _ in range(rows)]
    return torch.tensor(found, dtype=torch.int64, device=device).view(rows, columns)


@dataclass(frozen=True)
class FollowCase(KernelCase):
    last: tuple[int, ...]
    """Drafts of each sequence in the step before."""
    lengths: tuple[int, ...]
    """The same in the next."""
    given: bool = False
    seed: int = 0

    op: ClassVar[str] = "drafts"

    def variant(self, gpu: Gpu) -> str:
        return "follow, given" if self.given else "follow"

    def refuses(self, gpu: Gpu) -> Reason | None:
        return None

    def start(self, gpu: Gpu, device: str) -> Finish:
        chance = random.Random(self.seed)
        sequences, rows = len(self.last), sum(self.last) + len(self.last)
        last, layout = layout_of(self.last, device), layout_of(self.lengths, device)
        drawn = tokens_of(chance, 1, rows, device)[0].int()
        verified = torch.where(last.drafted, tokens_of(chance, sequences, max(self.last), device), NO_TOKEN)
        # Rows of a wider matrix, as a head's guesses may be.
        drafts = tokens_of(chance, sequences, max(self.lengths) + 3, device)
        given = None
        if self.given:
            given = torch.tensor([chance.randrange(length + 1) for length in self.last], device=device)
        just_written(drawn, drafts)
        found = follow.follow(drawn, last, verified, layout, drafts, given)

        def finish() -> Iterator[Compared]:
            want = reference.follow(drawn, last, verified, layout, drafts, given)
            for name in ("own", "accepted", "drafts", "moved"):
                yield same(name, getattr(found, name), getattr(want, name))
            yield same("tokens", found.tokens(), want.tokens())

        return finish


@dataclass(frozen=True)
class MoveCase(KernelCase):
    lengths: tuple[int, ...]
    head: bool = False
    """As a draft head's step: one kind of layers, wide lengths, drafts and no tokens."""
    page_size: int = 16
    seed: int = 0

    op: ClassVar[str] = "drafts"

    def variant(self, gpu: Gpu) -> str:
        return "move on, draft head" if self.head else "move on"

    def refuses(self, gpu: Gpu) -> Reason | None:
        return None

    def start(self, gpu: Gpu, device: str) -> Finish:
        followed, firsts = self._followed(device)
        pages = self._pages(device)
        steps = [self._standing(followed, firsts, device) for _ in range(2)]
        just_written(followed.own, followed.accepted, followed.drafts, followed.moved)
        follow.move_on(followed, steps[0], pages)

        def finish() -> Iterator[Compared]:
            reference.move_on(followed, steps[1], pages)
            for name in ("positions", "slots", "lens", "tokens", "drafts"):
                found, want = (getattr(step, name) for step in steps)
                if want is not None:
                    yield same(name, found, want)

        return finish

    def _followed(self, device: str) -> tuple[Followed, list[int]]:
        chance, layout = random.Random(self.seed), layout_of(self.lengths, device)
        accepted = torch.tensor([chance.randrange(16) for _ in self.lengths], device=device)
        own = tokens_of(chance, 1, len(self.lengths), device)[0]
        drafts = torch.where(layout.drafted, tokens_of(chance, len(self.lengths), max(self.lengths), device), NO_TOKEN)
        firsts = [chance.randrange(5 * self.page_size) for _ in self.lengths]
        return Followed(own, accepted, drafts, accepted[layout.owners], layout), firsts

    def _pages(self, device: str) -> Pages:
        """Wide enough for the last position of all, with others' tables in between."""
        max_pages = 5 + -(-32 // self.page_size)
        kinds, each = 1 if self.head else 2, len(self.lengths) * max_pages + 7
        flat = torch.randperm(3 + 2 * each, generator=torch.Generator().manual_seed(self.seed)).int().to(device)
        return Pages(flat, tuple(3 + kind * each for kind in range(kinds)), max_pages, self.page_size)

    def _standing(self, followed: Followed, firsts: Sequence[int], device: str) -> Standing:
        sequences, layout = len(firsts), followed.layout
        rows = len(layout.owners)
        begin = torch.tensor(firsts, device=device)[layout.owners]
        place = torch.arange(rows, device=device) - layout.first_rows[layout.owners]
        lines = torch.full((5, rows + 4), POISON, device=device)
        lines[1, :rows] = begin + place
        lens = torch.full((sequences + 2,), 7, dtype=torch.int64 if self.head else torch.int32, device=device)
        kinds = 1 if self.head else 2
        shown = torch.full((15, sequences + 2), POISON, device=device) if self.head else None
        return Standing(lines[1], lines[2 : 2 + kinds], lens, None if self.head else lines[0], shown)


def cases() -> Iterator[KernelCase]:
    uneven, many = (3, 0, 15, 1, 2), tuple((5 * at) % 8 for at in range(64))
    yield FollowCase("one sequence", (3,), (3,))
    yield FollowCase("nothing was drafted", (0, 0), (1, 0))
    yield FollowCase("only one sequence drafts next", (2, 3), (0, 1))
    for seed in range(4):
        yield FollowCase(f"uneven drafts {seed}", uneven, uneven[::-1], seed=seed)
    yield FollowCase("64 sequences", many, many[::-1])
    yield FollowCase("what is accepted is given", uneven, uneven[::-1], given=True)
    for head in (False, True):
        who = "a draft head" if head else "a step"
        yield MoveCase(f"{who} of one sequence", (3,), head)
        yield MoveCase(f"{who} of uneven drafts", uneven, head)
        yield MoveCase(f"{who} with pages of one token", uneven, head, page_size=1, seed=1)
        yield MoveCase(f"{who} of 64 sequences", many, head, seed=2)
