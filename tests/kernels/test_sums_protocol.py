"""The protocol of sums over ranks (``kernels/sums/spec.py``), in every order in which its steps can happen.

Ranks run the same sums one after the other. What one writes into another's memory arrives whenever it likes, later
writes before earlier ones too; only a flag arrives after all that was written before it (release), and flags of one
sender in their order. All states that can be reached are looked at: every sum must be of the rows of its own use, and
the ranks must come to the end. What the protocol rests on is then taken away, one thing at a time, and must be missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pytest


@dataclass(frozen=True)
class Rules:
    """The protocol; each field is one thing that it rests on."""

    world: int
    uses: int
    halves: int = 2
    released: bool = True
    """A flag arrives after the rows before it."""
    waits: bool = True
    passes: Callable[[int, int], bool] = lambda flag, use: flag >= use
    """Whether a flag lets a rank of this use go on."""


class Rank(NamedTuple):
    use: int
    """That it is in, from 1 on."""
    step: int
    """0: sends next. Then it waits for the flags, all at once, and reads the slots one by one."""


class Sent(NamedTuple):
    """On its way from one rank to another."""

    sender: int
    receiver: int
    use: int
    is_flag: bool


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    slots: tuple[int, ...]
    """Use whose row it holds, by receiver, half and sender."""
    flags: tuple[int, ...]
    """By receiver and sender."""
    sent: frozenset[Sent]


class Wrong(Exception):
    """A sum of rows that are not its own, or ranks that wait for ever."""


WAITS = 1
READS = 2


def changed(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


def slot(rules: Rules, receiver: int, use: int, sender: int) -> int:
    return (receiver * rules.halves + use % rules.halves) * rules.world + sender


def arrivals(rules: Rules, state: State) -> Iterator[State]:
    for each in state.sent:
        if each.is_flag:
            earlier = (o for o in state.sent if o[:2] == each[:2] and o != each)
            if any(o.use <= each.use and (o.is_flag or rules.released) for o in earlier):
                continue
            at = each.receiver * rules.world + each.sender
            yield state._replace(flags=changed(state.flags, at, each.use), sent=state.sent - {each})
        else:
            at = slot(rules, each.receiver, each.use, each.sender)
            yield state._replace(slots=changed(state.slots, at, each.use), sent=state.sent - {each})


def moves(rules: Rules, state: State, place: int) -> Iterator[State]:
    """What a rank can do next, if anything."""
    rank, world = state.ranks[place], rules.world
    if rank.use > rules.uses:
        return

    def then(use: int, step: int, state: State = state) -> State:
        return state._replace(ranks=(*state.ranks[:place], Rank(use, step), *state.ranks[place + 1 :]))

    if rank.step == 0:
        others = [other for other in range(world) if other != place]
        sent = state.sent | {Sent(place, other, rank.use, kind) for other in others for kind in (False, True)}
        # To itself nothing travels.
        slots = changed(state.slots, slot(rules, place, rank.use, place), rank.use)
        flags = changed(state.flags, place * world + place, rank.use)
        yield then(rank.use, WAITS, state._replace(sent=sent, slots=slots, flags=flags))
    elif rank.step == WAITS:
        own = state.flags[place * world :][:world]
        if not rules.waits or all(rules.passes(flag, rank.use) for flag in own):
            yield then(rank.use, READS)
    else:
        sender = rank.step - READS
        found = state.slots[slot(rules, place, rank.use, sender)]
        if found != rank.use:
            raise Wrong(f"rank {place} adds up the row of use {found} of rank {sender} in use {rank.use}")
        yield then(rank.use + 1, 0) if sender == world - 1 else then(rank.use, rank.step + 1)


def explore(rules: Rules) -> int:
    """All states; how many there are."""
    first = State(
        (Rank(1, 0),) * rules.world,
        (0,) * (rules.world**2 * rules.halves),
        (0,) * rules.world**2,
        frozenset(),
    )
    seen, todo = {first}, [first]
    while todo:
        state = todo.pop()
        following = list(arrivals(rules, state))
        for place in range(rules.world):
            following += moves(rules, state, place)
        if not following and any(rank.use <= rules.uses for rank in state.ranks):
            raise Wrong(f"nobody can go on: {state}")
        fresh = [each for each in following if each not in seen]
        seen.update(fresh)
        todo += fresh
    return len(seen)


def test_no_order_of_events_gives_a_wrong_sum() -> None:
    assert explore(Rules(2, 5)) > 300


def test_three_ranks() -> None:
    assert explore(Rules(3, 3)) > 15_000


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        (Rules(2, 3, halves=1), "adds up the row of use"),
        (Rules(2, 3, released=False), "adds up the row of use"),
        (Rules(2, 3, waits=False), "adds up the row of use"),
        (Rules(2, 3, passes=lambda flag, use: flag == use), "nobody can go on"),
        (Rules(2, 3, passes=lambda flag, use: flag >= use - 1), "adds up the row of use"),
    ],
    ids=["one half", "no release", "no wait", "flags must be equal", "waits for the use before"],
)
def test_what_the_protocol_rests_on_is_missed(rules: Rules, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        explore(rules)
