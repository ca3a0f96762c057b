"""Which of many replicas a request goes to, so that its prompt finds what it shares with earlier ones in their caches.

A prompt is a *chain*: one number for each block of its text, which stands for that block and all before it. Two prompts
that begin alike have chains that begin alike. The router remembers which replicas were sent which blocks, in a table of
fixed size, and sends a request where the fewest blocks are missing, as long as that replica is not much busier than the
idlest one. The rule is pure: no clock, no random numbers, nothing of Ray. ``bench scale`` simulates with the same code.

    chain    [b0, b0b1, b0b1b2, …]          most MAX_BLOCKS, of BLOCK_BYTES each
    table    b0b1 → replicas {2, 5}         most max_entries, least recently used goes first
    cost     missing blocks + blocks_per_request · (open requests of the replica - those of the idlest)
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from microscale.errors import BadSetting

BLOCK_BYTES = 1024
"""About 256 tokens of English. A shorter block finds more of what is shared and costs the router more."""
MAX_BLOCKS = 256
"""Of one prompt; what follows does not change where it goes."""
MAX_ENTRIES = 2**16
"""Blocks in the table: 65,536 prompts of one block, or 256 of the longest. About 16 MB at eight replicas."""
BLOCKS_PER_REQUEST = 4.0
"""How many missing blocks weigh as much as one more open request."""
FIRST = ("tools", "functions", "system", "instructions")
"""Fields of a request that models are told before the conversation, in all APIs that the server speaks."""
CONVERSATION = ("messages", "input", "prompt")


class PrefixPolicy:
    """Remembers what replicas were sent, and orders them for a request. Replicas are small numbers."""

    def __init__(self, max_entries: int = MAX_ENTRIES, blocks_per_request: float = BLOCKS_PER_REQUEST) -> None:
        if max_entries < 1 or blocks_per_request <= 0:
            raise BadSetting("Routing by prefix needs max_entries and blocks_per_request above 0.")
        self._max_entries = max_entries
        self._weight = blocks_per_request
        self._holders: OrderedDict[int, int] = OrderedDict()
        """Block → replicas that were sent it, as the bits of a number. Least recently used first."""
        self._num_short = 0
        """Prompts of less than a block, which replicas take by turns."""

    def __len__(self) -> int:
        return len(self._holders)

    def order(self, chain: Sequence[int], loads: Mapping[int, int]) -> list[int]:
        """The replicas of ``loads`` (open requests of each), best first.

        Replicas that cost the same come in an order that the prompt's first block decides, the same one everywhere:
        several routers that know nothing of each other send a new conversation to the same replica. Prompts of less
        than a block take them by turns.
        """
        if not loads:
            return []
        idlest = min(loads.values())
        held = self._held(chain, loads)
        if not chain:
            self._num_short += 1
        seed = chain[0] if chain else self._num_short

        def cost(replica: int) -> tuple[float, int]:
            missing = len(chain) - held.get(replica, 0)
            return missing + self._weight * (loads[replica] - idlest), _mixed(seed, replica)

        return sorted(loads, key=cost)

    def choose(self, chain: Sequence[int], loads: Sequence[int], idlest: int) -> int:
        """The first of ``order``, for many replicas: looks at those that hold a block, and at ``idlest``."""
        least = loads[idlest]
        best, best_cost = idlest, float(len(chain))
        for replica, held in self._held(chain).items():
            cost = len(chain) - held + self._weight * (loads[replica] - least)
            if cost < best_cost:
                best, best_cost = replica, cost
        return best

    def routed(self, chain: Sequence[int], replica: int) -> None:
        """The request with this prompt was sent to ``replica``, which will have its blocks."""
        bit = 1 << replica
        holders = self._holders
        # The last block first: where the table is full, the end of a prompt goes before its beginning.
        for block in reversed(chain):
            holders[block] = holders.pop(block, 0) | bit
        while len(holders) > self._max_entries:
            holders.popitem(last=False)

    def forget(self, replica: int) -> None:
        """It has ended; whichever gets its number next has an empty cache."""
        keep = ~(1 << replica)
        for block, holders in list(self._holders.items()):
            if holders & keep:
                self._holders[block] = holders & keep
            else:
                del self._holders[block]

    def _held(self, chain: Sequence[int], among: Mapping[int, int] | None = None) -> dict[int, int]:
        """Replica → how many blocks of the chain it holds, where that is any.

        Only the deepest count matters: who was sent a block was sent all before it.
        """
        found: dict[int, int] = {}
        seen = 0
        for depth in range(len(chain), 0, -1):
            new = self._holders.get(chain[depth - 1], 0) & ~seen
            seen |= new
            for replica in _bits(new):
                if among is None or replica in among:
                    found[replica] = depth
        return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _mixed(seed: int, replica: int) -> int:
    return zlib.crc32(b"%d %d" % (seed, replica))


def chain_of(text: bytes, block_bytes: int = BLOCK_BYTES, max_blocks: int = MAX_BLOCKS) -> tuple[int, ...]:
    """The chain of a prompt: its whole blocks, each hashed with all that is before it."""
    num_blocks = min(len(text) // block_bytes, max_blocks)
    chain, last = [], b""
    for i in range(num_blocks):
        last = blake2b(text[i * block_bytes : (i + 1) * block_bytes], key=last, digest_size=8).digest()
        chain.append(int.from_bytes(last))
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
