"""Which of many replicas a request goes to, so that its prompt finds what it shares with earlier ones in their caches.

A prompt is a *chain*: one number for each of its beginnings of 1, 2, 3, 4, 6, 8, 12 … KiB. Two prompts that begin alike
have chains that begin alike. The router remembers which replicas were sent which beginnings, in a table of fixed size,
and sends a request where the least of its prompt is missing, as long as that replica is not much busier than the idlest
one. Several routers do not see each other's tables, so each prompt also has a *home*, which its hash decides: a new
conversation goes there, and whichever router gets the next turn knows where to look. The rule is pure: no clock, no
random numbers, nothing of Ray. ``bench scale`` simulates with the same code.

    chain    [1 KiB, 2 KiB, 3 KiB, 4 KiB, 6 KiB …]   a number each
    table    the first 6 KiB → replicas {2, 5}       most max_entries, least recently used goes first
    cost     KiB missing + kib_per_request · (open requests of the replica - those of the idlest)
    home     where the first beginning that is not popular falls on a ring of the replicas
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from microscale.errors import BadSetting

KIB = 1024
MASK = 2**64 - 1
BOUNDS = (1, 2, 3, *(size for power in range(2, 10) for size in (2**power, 2**power * 3 // 2)), 1024)
"""The beginnings, in KiB: from 2 on each is at most half as long again as the one before, so up to a third of what two
prompts share goes unseen. Equal blocks of 1 KiB would take four times as many entries for 48 KiB, the mean of chats."""
MAX_ENTRIES = 2**18
"""Beginnings in the table: about 40 MB when full. A chat's request adds four (docs/parallel.md)."""
KIB_PER_REQUEST = 8.0
"""How much missing prompt weighs as much as one more open request. 1 KiB is about 256 tokens of English. Of 8, 16 and
32, 8 gave the earliest first tokens in ``bench scale`` with 16 replicas at 2.5 and 3.25 requests a second each."""
MOST_HOLDERS = 32
"""A beginning that more replicas hold, such as a system prompt, is no reason to prefer one of them."""
POPULAR = 64
"""Times that a beginning was seen, after which it is taken for what many conversations share, and gives no home."""
COUNT_BITS = 16
"""Of a value of the table: how often it was seen. Above them a bit for each replica."""
MOST_COUNT = 2**COUNT_BITS - 1
HOME_SHARE = 0.5
"""How much of a prompt its home is taken to hold, where nothing is known."""
RING_POINTS = 64
"""Of each replica: shares of the ring then differ by about an eighth."""


class PrefixPolicy:
    """Remembers what replicas were sent, and orders them for a request. Replicas are small numbers."""

    def __init__(self, max_entries: int = MAX_ENTRIES, kib_per_request: float = KIB_PER_REQUEST) -> None:
        if max_entries < 1 or kib_per_request <= 0:
            raise BadSetting("Routing by prefix needs max_entries and kib_per_request above 0.")
        self._max_entries = max_entries
        self._weight = kib_per_request
        self._table: OrderedDict[int, int] = OrderedDict()
        """Beginning → how often it was seen, and the replicas that were sent it. Least recently used first."""
        self._ring: list[tuple[int, int]] = []
        """Points and whose they are, sorted."""
        self._turn = 0
        """Replicas that cost the same are taken by turns."""

    def __len__(self) -> int:
        return len(self._table)

    def join(self, replica: int, identity: int) -> None:
        """``identity``: the same for this replica in every router."""
        self._ring += [(_mixed(identity, point), replica) for point in range(1, RING_POINTS + 1)]
        self._ring.sort()

    def forget(self, replica: int) -> None:
        """It has ended; whichever gets its number next has an empty cache."""
        self._ring = [(point, owner) for point, owner in self._ring if owner != replica]
        keep = ~(1 << COUNT_BITS + replica)
        for beginning, value in list(self._table.items()):
            if (value & keep) > MOST_COUNT:
                self._table[beginning] = value & keep
            else:
                del self._table[beginning]

    def order(self, chain: Sequence[int], loads: Mapping[int, int]) -> list[int]:
        """The replicas of ``loads`` (open requests of each), best first."""
        if not loads:
            return []
        least = min(loads.values())
        held = self._held(chain)
        self._turn += 1

        def cost(replica: int) -> tuple[float, int]:
            missing = _kib(len(chain)) - held.get(replica, 0.0)
            return missing + self._weight * (loads[replica] - least), (replica + self._turn) % len(loads)

        return sorted(loads, key=cost)

    def choose(self, chain: Sequence[int], loads: Sequence[int], idlest: int) -> int:
        """The first of ``order``, for many replicas: looks at ``idlest``, home, and holders of what few others hold."""
        least, whole = loads[idlest], _kib(len(chain))
        held = self._held(chain, idlest)
        best, best_cost = idlest, whole - held.pop(idlest, 0.0)
        for replica, kib in held.items():
            cost = whole - kib + self._weight * (loads[replica] - least)
            if cost < best_cost:
                best, best_cost = replica, cost
        return best

    def home(self, chain: Sequence[int]) -> int | None:
        """The replica on whose part of the ring the prompt falls, by its first beginning that is not popular."""
        if self._ring:
            for beginning in chain:
                if self._table.get(beginning, 0) & MOST_COUNT < POPULAR:
                    at = bisect_right(self._ring, (_mixed(beginning, 0), 0))
                    return self._ring[at % len(self._ring)][1]
        return None

    def routed(self, chain: Sequence[int], replica: int) -> None:
        """The request with this prompt was sent to ``replica``, which will have it in its cache."""
        bit = 1 << COUNT_BITS + replica
        table = self._table
        # The longest first: where the table is full, the end of a prompt is forgotten before its beginning.
        for beginning in reversed(chain):
            value = table.pop(beginning, 0)
            table[beginning] = (value if value & MOST_COUNT == MOST_COUNT else value + 1) | bit
        while len(table) > self._max_entries:
            table.popitem(last=False)

    def _held(self, chain: Sequence[int], idlest: int | None = None) -> dict[int, float]:
        """Replica → how many KiB of the prompt it holds, or its home may.

        Only the longest counts: who was sent a beginning was sent all shorter ones. With ``idlest``, of beginnings that
        many hold only that one's is told.
        """
        found: dict[int, float] = {}
        seen = 0
        for depth in range(len(chain), 0, -1):
            new = (self._table.get(chain[depth - 1], 0) >> COUNT_BITS) & ~seen
            seen |= new
            if idlest is not None and new.bit_count() > MOST_HOLDERS:
                new &= 1 << idlest
            for replica in _bits(new):
                found[replica] = float(_kib(depth))
        if (home := self.home(chain)) is not None:
            found[home] = max(found.get(home, 0.0), HOME_SHARE * _kib(len(chain)))
        return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _mixed(seed: int, other: int) -> int:
    """A number as good as random for each pair: the finaliser of MurmurHash3."""
    mixed = (seed ^ other * 0x9E3779B97F4A7C15) & MASK
    mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD & MASK
    mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return mixed ^ mixed >> 33


def _kib(depth: int) -> int:
    """How long the beginning is that the first ``depth`` numbers of a chain stand for."""
    return BOUNDS[depth - 1] if depth else 0


def chain_length(num_bytes: float) -> int:
    """Of a prompt with so many bytes."""
    return bisect_right(BOUNDS, num_bytes / KIB)


def chain_of(text: bytes) -> tuple[int, ...]:
    """The chain of a prompt: a hash of each of its beginnings."""
    chain, last = [], 0
    hashed = blake2b(digest_size=8)
    for bound in BOUNDS[: chain_length(len(text))]:
        hashed.update(text[last * KIB : bound * KIB])
        chain.append(int.from_bytes(hashed.digest()))
        last = bound
    return tuple(chain)
