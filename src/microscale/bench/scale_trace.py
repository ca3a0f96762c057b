"""Requests like those of a public trace, from its statistics: sessions, turns, lengths, gaps. Seeded.

The trace is Mooncake's ``conversation_trace.jsonl`` (FAST'25 release, Apache-2.0): 12,031 requests of an hour of Kimi's
chats, with lengths, arrival times and a hash for each 512 tokens of prompt. A request *follows* the last earlier one
with which it shares the longest beginning of more than one hash; all requests share the first. What is here was counted
from that file (commit 3b5a5941); the trace itself is not. Between two quantiles values are drawn log-evenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PROBABILITIES = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
FIRST_INPUT = (891, 894, 897, 905, 1336, 5264, 13056, 25553, 38464, 89867, 126195)
"""Tokens of the first prompt of a session; mean 10,765."""
NEW_INPUT = (1, 1, 163, 304, 534, 829, 3471, 9741, 14677, 26653, 94968)
"""Tokens of a follower's prompt that it does not share; mean 3,242."""
OUTPUT = (1, 3, 10, 24, 156, 350, 472, 597, 698, 1115, 2000)
"""Tokens of an answer; mean 343."""
GAP_S = (1, 12, 30, 42, 66, 123, 264, 483, 615, 1473, 3030)
"""Between a request and the one that follows it; mean 215."""
KEPT = (0.05, 0.1, 0.1, 0.4, 0.9, 1, 1, 1, 1, 1, 1)
"""How much of the earlier prompt the follower shares; mean 0.85."""
FOLLOWED = (0.307, 0.419, 0.51, 0.587, 0.588, 0.683, 0.75)
"""The chance that the first, second … turn is followed by another; the last one counts for all later turns."""
SYSTEM_TOKENS = 512
"""What all requests share."""
MAX_TURNS = 40
MAX_INPUT = 126_195


@dataclass(frozen=True)
class Requests:
    """In the order of arrival; one entry of each array for each request."""

    arrival_s: Floats
    session: Ints
    turn: Ints
    input_len: Ints
    shared_len: Ints
    """Tokens of the prompt that the session's last one began with too."""
    output_len: Ints

    def __len__(self) -> int:
        return len(self.arrival_s)


def draw(rng: np.random.Generator, table: tuple[float, ...], size: int) -> Floats:
    """Values with these quantiles."""
    logs = np.log(np.asarray(table, dtype=np.float64))
    return np.exp(np.interp(rng.random(size), PROBABILITIES, logs))


def turns_per_session() -> float:
    """The mean, by the chances above."""
    mean, alive = 0.0, 1.0
    for turn in range(MAX_TURNS):
        mean += alive
        alive *= FOLLOWED[min(turn, len(FOLLOWED) - 1)]
    return mean


def make_requests(rate: float, begin_s: float, end_s: float, seed: int) -> Requests:
    """Sessions that begin at random, ``rate`` requests a second in all; the first of them up to an hour before."""
    rng = np.random.default_rng(seed)
    before_s = float(GAP_S[-1])
    span = end_s - begin_s + before_s
    num_sessions = int(rng.poisson(rate / turns_per_session() * span))
    at = begin_s - before_s + rng.random(num_sessions) * span
    length = draw(rng, FIRST_INPUT, num_sessions)
    shared = np.minimum(length, SYSTEM_TOKENS)
    alive = np.arange(num_sessions)
    found: list[tuple[Any, ...]] = []
    for turn in range(MAX_TURNS):
        output = draw(rng, OUTPUT, len(alive))
        found.append((at, alive, np.full(len(alive), turn), length, shared, output))
        chance = FOLLOWED[min(turn, len(FOLLOWED) - 1)]
        again = (rng.random(len(alive)) < chance) & (at < end_s)
        alive, before = alive[again], length[again]
        at = at[again] + draw(rng, GAP_S, len(alive))
        shared = np.maximum(before * np.minimum(draw(rng, KEPT, len(alive)), 1.0), np.minimum(before, SYSTEM_TOKENS))
        length = np.minimum(shared + draw(rng, NEW_INPUT, len(alive)), MAX_INPUT)
        shared = np.minimum(shared, length)
    columns = [np.concatenate(parts) for parts in zip(*found, strict=True)]
    here = np.flatnonzero((columns[0] >= begin_s) & (columns[0] < end_s))
    here = here[np.argsort(columns[0][here], kind="stable")]
    whole = [np.maximum(np.rint(column[here]), 0).astype(np.int64) for column in columns[1:]]
    session, turn_of, input_len, shared_len, output_len = whole
    return Requests(columns[0][here], session, turn_of, np.maximum(input_len, 1), shared_len, np.maximum(output_len, 1))
