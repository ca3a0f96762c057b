"""Which of many replicas a request goes to, so that its prompt finds what it shares with earlier ones in their caches.

A prompt is a *chain*: one number for each of its beginnings of 1, 2, 3, 4, 6, 8, 12 … KiB. Two prompts that begin alike
have chains that begin alike. The router remembers which replicas were sent which beginnings, in a table of fixed size,
and sends a request where the least of its prompt is missing, as long as that replica is not much busier than the idlest
one. The rule is pure: no clock, no random numbers, nothing of Ray. ``bench scale`` simulates with the same code.

    chain    [1 KiB, 2 KiB, 3 KiB, 4 KiB, 6 KiB …]   a number each
    table    the first 6 KiB → replicas {2, 5}       most max_entries, least recently used goes first
    cost     KiB missing + kib_per_request · (open requests of the replica - those of the idlest)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from microscale.errors import BadSetting

KIB = 1024
MASK = 2**64 - 1
BOUNDS = (1, 2, 3, *(size for power in range(2, 10) for size in (2**power, 2**power * 3 // 2)), 1024)
"""The beginnings, in KiB: from 2 on each is at most half as long again as the one before, so up to a third of what two
prompts share goes unseen. Equal blocks of 1 KiB would take four times as many entries for 48 KiB, the mean of chats."""
MAX_ENTRIES = 2**18
"""Beginnings in the table: about 40 MB when full. A turn of a chat adds four (docs/scale.md)."""
KIB_PER_REQUEST = 8.0
"""How much missing prompt weighs as much as one more open request. 1 KiB is about 256 tokens of English. Of 8, 16 and
32, 8 gave the earliest first tokens in ``bench scale`` with 16 replicas; 4 left some of them waiting for 30 s."""
MOST_HOLDERS = 32
"""A beginning that more replicas hold, such as a system prompt, is no reason to prefer one of them."""
FIRST = ("tools", "functions", "system", "instructions")
"""Fields of a request that models are told before the conversation, in all APIs that the server speaks."""
CONVERSATION = ("messages", "input", "prompt")


class PrefixPolicy:
    """Remembers what replicas were sent, and orders them for a request. Replicas are small numbers."""

    def __init__(self, max_entries: int = MAX_ENTRIES, kib_per_request: float = KIB_PER_REQUEST) -> None:
        if max_entries < 1 or kib_per_request <= 0:
            raise BadSetting("Routing by prefix needs max_entries and kib_per_request above 0.")
        self._max_entries = max_entries
        self._weight = kib_per_request
        self._holders: OrderedDict[int, int] = OrderedDict()
        """Beginning → replicas that were sent it, as the bits of a number. Least recently used first."""
        self._num_short = 0
        """Prompts with no chain, which replicas take by turns."""

    def __len__(self) -> int:
        return len(self._holders)

    def order(self, chain: Sequence[int], loads: Mapping[int, int]) -> list[int]:
        """The replicas of ``loads`` (open requests of each), best first.

        Replicas that cost the same come in an order that the prompt's first KiB decides, the same one everywhere:
        several routers that know nothing of each other send a new conversation to the same replica. Shorter
        prompts take them by turns.
        """
        if not loads:
            return []
        least = min(loads.values())
        held = self._held(chain)
        self._num_short += not chain

        def tie(replica: int) -> int:
            return _mixed(chain[0], replica) if chain else (replica + self._num_short) % len(loads)

        def cost(replica: int) -> tuple[float, int]:
            missing = _kib(len(chain)) - _kib(held.get(replica, 0))
            return missing + self._weight * (loads[replica] - least), tie(replica)

        return sorted(loads, key=cost)

    def choose(self, chain: Sequence[int], loads: Sequence[int], idlest: int) -> int:
        """The first of ``order``, for many replicas: looks at ``idlest``, and at holders of what few others hold."""
        least, whole = loads[idlest], _kib(len(chain))
        held = self._held(chain, idlest)
        best, best_cost = idlest, float(whole - _kib(held.pop(idlest, 0)))
        for replica, depth in held.items():
            cost = whole - _kib(depth) + self._weight * (loads[replica] - least)
            if cost < best_cost:
                best, best_cost = replica, cost
        return best

    def routed(self, chain: Sequence[int], replica: int) -> None:
        """The request with this prompt was sent to ``replica``, which will have it in its cache."""
        bit = 1 << replica
        holders = self._holders
        # The longest first: where the table is full, the end of a prompt is forgotten before its beginning.
        for beginning in reversed(chain):
            holders[beginning] = holders.pop(beginning, 0) | bit
        while len(holders) > self._max_entries:
            holders.popitem(last=False)

    def forget(self, replica: int) -> None:
        """It has ended; whichever gets its number next has an empty cache."""
        keep = ~(1 << replica)
        for beginning, holders in list(self._holders.items()):
            if holders & keep:
                self._holders[beginning] = holders & keep
            else:
                del self._holders[beginning]

    def _held(self, chain: Sequence[int], idlest: int | None = None) -> dict[int, int]:
        """Replica → how many numbers of the chain it holds.

        Only the deepest counts: who was sent a beginning was sent all shorter ones. With ``idlest``, of beginnings that
        many hold only that one's is told.
        """
        found: dict[int, int] = {}
        seen = 0
        for depth in range(len(chain), 0, -1):
            new = self._holders.get(chain[depth - 1], 0) & ~seen
            seen |= new
            if idlest is not None and new.bit_count() > MOST_HOLDERS:
                new &= 1 << idlest
            for replica in _bits(new):
                found[replica] = depth
        return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _mixed(seed: int, replica: int) -> int:
    """A number as good as random for each pair: the finaliser of MurmurHash3."""
    mixed = (seed ^ replica * 0x9E3779B97F4A7C15) & MASK
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


def prompt_text(body: bytes) -> bytes:
    """What of a request's JSON decides its prompt, in the order in which a model is told it. Empty for other bodies.

    A conversation that goes on gives a text that begins with the text of before. It is not the prompt itself: only
    the replica has the chat format.
    """
    try:
        request: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return b""
    if not isinstance(request, dict):
        return b""
    parts = [_json(request[name]) for name in FIRST if request.get(name)]
    for name in CONVERSATION:
        said = request.get(name)
        if isinstance(said, str):
            parts.append(said.encode("utf-8", "backslashreplace"))
        elif isinstance(said, list) and said and isinstance(said[0], int):
            parts.append(_json(said)[:-1])  # token ids, without the bracket that ends them
        elif isinstance(said, list):
            parts.extend(map(_json, said))
    return b"\n".join(parts)


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)
