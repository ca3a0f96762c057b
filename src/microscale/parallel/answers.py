"""What ranks tell each other through their store before they share memory: whether each of them can, or why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch._C._distributed_c10d import PrefixStore

from microscale.errors import RankFailed
from microscale.parallel.sharding import Shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

YES, NO = "yes", "no: "


class Answers:
    """Whether every rank can do one thing. Each says it once; all see the same."""

    def __init__(self, store: Store, shard: Shard, thing: str) -> None:
        self._store = PrefixStore(thing, store)
        self._shard = shard

    def say(self, reason: str | None) -> None:
        """``reason``: why this rank cannot; ``None`` where it can."""
        self._store.set(str(self._shard.rank), YES if reason is None else NO + reason)

    def refused(self) -> bool:
        """Whether some rank has said by now that it cannot. Waits for nobody."""
        said = [str(rank) for rank in range(self._shard.world) if self._store.check([str(rank)])]
        return any(self._store.get(rank).decode().startswith(NO) for rank in said)

    def why_not(self) -> str | None:
        """Why not all of them can, in the words of the first that cannot; ``None`` where all can. Waits for all."""
        try:
            said = [self._store.get(str(rank)).decode() for rank in range(self._shard.world)]
        except RuntimeError as error:  # the library's word for a store that is gone, or that nobody writes to
            raise RankFailed(f"Rank {self._shard.rank} lost another rank: {error}") from error
        reasons = {rank: text.removeprefix(NO) for rank, text in enumerate(said) if text.startswith(NO)}
        if not reasons:
            return None
        if len(set(said)) == 1:
            return reasons[0]
        first = min(reasons)
        return f"rank {first}: {reasons[first]}"
