"""Which part of a model one of several ranks holds. Pure arithmetic, no torch.

Attention is split by heads, experts and MLPs by their intermediate width in whole blocks, lm_head by vocabulary. Where
there are fewer KV heads than ranks, several ranks hold the same one. Where blocks do not divide evenly, all ranks get
the width of the largest share, and the last ones are padded with zeros: 2880 on 4 ranks is 736 each.
"""

from __future__ import annotations

from dataclasses import dataclass

from microscale.errors import BadSetting, Unsupported

MAX_RANKS = 64
VOCABULARY_UNIT = 1024
"""lm_head is cut at multiples of this where the vocabulary is large enough: blocks of logits stay whole."""


@dataclass(frozen=True)
class Shard:
    """One rank of several."""

    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.world <= MAX_RANKS:
            raise BadSetting(f"--tensor-parallel-size {self.world} is not between 1 and {MAX_RANKS}.")
        if not 0 <= self.rank < self.world:
            raise BadSetting(f"Rank {self.rank} is not one of {self.world} ranks.")

    @property
    def is_whole(self) -> bool:
        return self.world == 1

    @property
    def is_first(self) -> bool:
        """Rank 0 adds what must be added once: biases of what is summed over the ranks."""
        return self.rank == 0


WHOLE = Shard()


@dataclass(frozen=True)
class HeadShare:
    """The heads of one rank, by their numbers in the whole model."""

    heads: range
    kv_heads: range


@dataclass(frozen=True)
class WidthShare:
    """One rank's part of a width: ``[begin, end)`` of the whole, then zeros up to ``size``."""

    begin: int
    end: int
    size: int


def split_heads(num_heads: int, num_kv_heads: int, shard: Shard) -> HeadShare:
    """Every head on exactly one rank, with the KV head that it reads. Fewer KV heads than ranks are held by several."""
    world, rank = shard.world, shard.rank
    if num_heads % world:
        raise Unsupported(
            f"{num_heads} attention heads cannot be split over {world} ranks; "
            f"--tensor-parallel-size {_nearest(num_heads, world)} divides them."
        )
    if num_kv_heads % world and world % num_kv_heads:
        raise Unsupported(
            f"{num_kv_heads} KV heads can be neither split over {world} ranks nor held by the same number of them each."
        )
    each = num_heads // world
    heads = range(rank * each, (rank + 1) * each)
    shared_by = num_heads // num_kv_heads
    return HeadShare(heads, range(heads.start // shared_by, (heads.stop - 1) // shared_by + 1))


def split_width(width: int, block: int, shard: Shard) -> WidthShare:
    """A width in whole blocks. All ranks have the same size; ranks that have fewer blocks of the whole have zeros."""
    if width % block:
        raise Unsupported(f"A width of {width} has no whole number of blocks of {block}.")
    blocks = width // block
    each = -(-blocks // shard.world)
    begin, end = (min(place * each, blocks) for place in (shard.rank, shard.rank + 1))
    return WidthShare(begin * block, end * block, each * block)


def split_vocabulary(vocab: int, shard: Shard) -> range:
    """Rows of lm_head. Every rank has some; the last may have fewer."""
    unit = VOCABULARY_UNIT if vocab >= VOCABULARY_UNIT * shard.world else 1
    units = -(-vocab // unit)
    base, more = divmod(units, shard.world)
    if not base:
        raise Unsupported(f"A vocabulary of {vocab} cannot be split over {shard.world} ranks.")
    begin = shard.rank * base + min(shard.rank, more)
    count = base + (shard.rank < more)
    return range(min(begin * unit, vocab), min((begin + count) * unit, vocab))


def _nearest(num_heads: int, world: int) -> int:
    """The largest number of ranks below ``world`` that divides the heads."""
    return next(count for count in range(world, 0, -1) if num_heads % count == 0)
