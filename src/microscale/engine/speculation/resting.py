"""When a draft head rests: it costs time behind every step, also while nothing is drafted.

    awake    ``SETTLING`` + ``WINDOW`` steps: if what drafts gave in the second part is less than ``LEAST`` of its time,
             the head rests; else the same again. If drafts were wanted in most of it, that was bad luck perhaps: 64
             steps of one sequence are off by 8 % of their time. Then it rests after ``BAD_WINDOWS`` in a row. Steps
             whose time says nothing count too: where the host is late for most, the head was awake twice as long
    resting  the head takes no notice of steps, so requests that run meanwhile are drafted for no more (``head``);
             ``FIRST_REST`` steps, and twice as many each time in a row, up to ``MOST_REST``

By the number of sequences, in doublings: a head that is of no use for 64 sequences may be for one. So at worst it is
awake in one step of seven, and the account of ``length`` holds for those steps.
"""

from __future__ import annotations

from dataclasses import dataclass

SETTLING = 64
"""Steps in which lengths and chances are found out."""
WINDOW = 64
LEAST = 0.03
BAD_WINDOWS = 3
FIRST_REST = 1024
MOST_REST = 8192


@dataclass
class _State:
    """Of steps of about so many sequences."""

    steps: int = 0
    """Of the present window."""
    us: float = 0.0
    gained: float = 0.0
    wanted: int = 0
    """Steps in which drafts were to pay."""
    bad: int = 0
    """Windows in a row in which they did not."""
    left: int = 0
    """Steps to rest."""
    rest: int = FIRST_REST
    """Steps of the next rest."""


class Resting:
    """Whether it rests in steps of so many sequences."""

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}

    def _of(self, sequences: int) -> _State:
        size = max(sequences - 1, 0).bit_length()
        state = self._states.get(size)
        if state is None:
            state = self._states[size] = _State()
        return state

    def rests(self, sequences: int) -> bool:
        return self._of(sequences).left > 0

    def stepped(self, sequences: int, us: float, gained: float, wanted: bool = False) -> None:
        """A step took so long; without drafts its tokens would have taken ``gained`` more. ``wanted``: as far as is
        known drafts pay, whether it had some or not."""
        state = self._of(sequences)
        if state.left:
            state.left -= 1
            return
        state.steps += 1
        if state.steps <= SETTLING:
            return
        state.us += us
        state.gained += gained
        state.wanted += wanted
        if state.steps < SETTLING + WINDOW:
            return
        if state.gained >= LEAST * state.us:
            state.rest, state.bad = FIRST_REST, 0
        else:
            state.bad += 1 if state.wanted > WINDOW // 2 else BAD_WINDOWS
        if state.bad >= BAD_WINDOWS:
            state.left, state.rest, state.bad = state.rest, min(2 * state.rest, MOST_REST), 0
        state.steps, state.us, state.gained, state.wanted = 0, 0.0, 0.0, 0
