"""Chooses a replica for a request, so that its prompt finds in the replica's cache what it shares with earlier prompts.

A prompt has a *chain*: a hash of each of its beginnings of 1, 2, 3, 4, 6, 8, 12 … KiB. Prompts that begin alike have
chains that begin alike. The router remembers in a table of fixed size which replicas received which beginnings. It
prefers the replica that lacks the least of the prompt, unless that one is much busier than the idlest. Routers do not
see each other's tables, so each prompt also has a *home*, which its hash decides: a new conversation goes there, and
whichever router gets the next turn knows where to look. The rule is pure: no clock, no random numbers, nothing of Ray.

    chain    [1 KiB, 2 KiB, 3 KiB, 4 KiB, 6 KiB …]   one hash each
    table    the first 6 KiB → replicas {2, 5}       at most max_entries; the least recently used is dropped first
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
"""The beginnings, in KiB. From 2 on each is at most half as long again as the one before, so up to a third of what two
prompts share is not noticed. Equal blocks of 1 KiB would need four times as many entries for 48 KiB, a chat's mean."""
MAX_ENTRIES = 2**18
"""Beginnings in the table: about 40 MB when full. A chat's request adds four (docs/parallel.md)."""
KIB_PER_REQUEST = 8.0
"""How much missing prompt weighs as much as one more open request. 1 KiB is about 256 tokens of English. Of 8, 16 and
32, 8 gave the earliest first tokens in a simulation of 16 replicas at 2.5 and 3.25 requests a second each."""
POPULAR = 64
"""A beginning that was seen this often belongs to many conversations and decides no home."""
COUNT_BITS = 16
"""The low bits of a table value count how often the beginning was seen; above them is one bit per replica."""
MOST_COUNT = 2**COUNT_BITS - 1
HOME_SHARE = 0.5
"""The share of a prompt that its home is assumed to hold."""
RING_POINTS = 64
"""Points per replica. Shares of the ring then differ by about an eighth."""


class PrefixPolicy:
    """Remembers what replicas received, and orders them for a request. Replicas are small numbers."""

    def __init__(self, max_entries: int = MAX_ENTRIES, kib_per_request: float = KIB_PER_REQUEST) -> None:
        if max_entries < 1 or kib_per_request <= 0:
            raise BadSetting("Routing by prefix needs max_entries and kib_per_request above 0.")
        self._max_entries = max_entries
        self._weight = kib_per_request
        self._table: OrderedDict[int, int] = OrderedDict()
        """Beginning → how often it was seen, and the replicas that received it. Least recently used first."""
        self._ring: list[tuple[int, int]] = []
        """Points with their replicas, sorted."""
        self._turn = 0
        """Replicas of equal cost take turns."""

    def __len__(self) -> int:
        return len(self._table)

    def join(self, replica: int, identity: int) -> None:
        """``identity``: the same for this replica in every router."""
        self._ring += [(_mixed(identity, point), replica) for point in range(1, RING_POINTS + 1)]
        self._ring.sort()

    def forget(self, replica: int) -> None:
        """The replica has ended. The next one with its number begins with an empty cache."""
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

    def home(self, chain: Sequence[int]) -> int | None:
        """The replica on whose part of the ring the prompt falls, by its first beginning that is not popular."""
        if self._ring:
            for beginning in chain:
                if self._table.get(beginning, 0) & MOST_COUNT < POPULAR:
                    at = bisect_right(self._ring, (_mixed(beginning, 0), 0))
                    return self._ring[at % len(self._ring)][1]
        return None

    def routed(self, chain: Sequence[int], replica: int) -> None:
        """Note that a request with this prompt was sent to ``replica``, which will have it in its cache."""
        bit = 1 << COUNT_BITS + replica
        table = self._table
        # The longest first: when the table is full, the end of a prompt is dropped before its beginning.
        for beginning in reversed(chain):
            value = table.pop(beginning, 0)
            table[beginning] = (value if value & MOST_COUNT == MOST_COUNT else value + 1) | bit
        while len(table) > self._max_entries:
            table.popitem(last=False)

    def _held(self, chain: Sequence[int]) -> dict[int, float]:
        """Replica → KiB of the prompt that it holds, or that its home may hold.

        Only the longest beginning counts: a replica that received it received all shorter ones.
        """
        held: dict[int, float] = {}
        seen = 0
        for depth in range(len(chain), 0, -1):
            new = (self._table.get(chain[depth - 1], 0) >> COUNT_BITS) & ~seen
            seen |= new
            for replica in _bits(new):
                held[replica] = float(_kib(depth))
        if (home := self.home(chain)) is not None:
            held[home] = max(held.get(home, 0.0), HOME_SHARE * _kib(len(chain)))
        return held


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _mixed(seed: int, other: int) -> int:
    """A hash of the pair: the finaliser of MurmurHash3."""
    mixed = (seed ^ other * 0x9E3779B97F4A7C15) & MASK
    mixed = (mixed ^ mixed >> 33) * 0xFF51AFD7ED558CCD & MASK
    mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return mixed ^ mixed >> 33


def _kib(depth: int) -> int:
    """The length of the ``depth``-th beginning."""
    return BOUNDS[depth - 1] if depth else 0


def chain_length(num_bytes: float) -> int:
    """The number of beginnings of a prompt with this many bytes."""
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
