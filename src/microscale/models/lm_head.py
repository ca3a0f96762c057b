"""Which rows of lm_head a rank has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from microscale.parallel.sharding import Shard, split_vocabulary

if TYPE_CHECKING:
    from torch import Tensor


class HasVocabulary(Protocol):
    """A config, as far as lm_head needs it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def shard(self) -> Shard: ...


def own_rows(table: Tensor, config: HasVocabulary) -> Tensor:
    """The rank's rows of an embedding table that is also lm_head: the table itself where it has all of them."""
    if config.shard.is_whole:
        return table
    rows = split_vocabulary(config.vocab_size, config.shard)
    return table[rows.start : rows.stop]
