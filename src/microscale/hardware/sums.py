"""How ranks add up what each of them computed: which way a sum takes, and why. Pure facts and arithmetic, no torch.

peers   one launch of ours: every rank writes its part into all others' memory and adds up what has come
nccl    the library's, for all that is larger or further away
gloo    through the host's memory, for CPUs and for GPUs that NCCL does not take
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from microscale.hardware.families import Gpu

PEER_WORLDS = (2, 4, 8)
"""Numbers of ranks that there are kernels for."""
PEER_ROWS = 64
"""Rows of the largest tensor: a program for each. They wait for each other across GPUs, so all of them must run at
once: the smallest card has 48 SMs, and each holds several."""
PEER_ROW_BYTES = 32768
"""Of a row, at most: 16384 numbers in bf16."""
SAVED_US = 10.0
"""What one launch is faster than NCCL's rounds, for tensors of no size. Taken from what is published of NVLink and
PCIe; nobody has measured it here."""
SLOWEST_LINK_GBS = 25.0
"""Of links through which GPUs see each other's memory: PCIe 4.0 with 16 lanes."""


class Reduction(StrEnum):
    """Who adds up."""

    PEERS = "peers"
    NCCL = "nccl"
    GLOO = "gloo"


@dataclass(frozen=True)
class Joined:
    """How the ranks of a model are joined."""

    world: int
    on_gpus: bool = True
    one_machine: bool = True
    own_gpus: bool = True
    """Each rank has one for itself."""
    unmapped: str | None = None
    """Why the GPUs of a machine do not see each other's memory; ``None`` where they do."""

    @property
    def backend(self) -> Reduction:
        """Of torch.distributed: who adds up what our kernel does not."""
        return Reduction.NCCL if self.on_gpus and self.own_gpus else Reduction.GLOO

    @property
    def backend_because(self) -> str:
        if not self.on_gpus:
            return "ranks on a CPU"
        return "each rank has a GPU" if self.own_gpus else "NCCL takes no two ranks on one GPU"

    def refuses_peers(self) -> str | None:
        """Why no sum goes through peer-mapped memory; ``None`` where small ones do."""
        if not self.on_gpus:
            return "ranks on a CPU have no memory of a GPU"
        if self.world not in PEER_WORLDS:
            return f"there are kernels for {', '.join(map(str, PEER_WORLDS))} ranks, not for {self.world}"
        if not self.one_machine:
            return "GPUs of several machines do not see each other's memory"
        return self.unmapped


def most_rows(world: int, row_bytes: int) -> int:
    """Rows up to which one launch is expected to be faster than the library.

    One launch sends all of a tensor to world - 1 others; a ring sends 2 (world - 1) / world of it, in rounds. Between
    two ranks both send the same. With more, what is sent beyond that must take less than ``SAVED_US`` on the slowest
    link.
    """
    if row_bytes > PEER_ROW_BYTES:
        return 0
    more = (world - 1) * (1 - 2 / world)
    rows = PEER_ROWS if not more else int(SAVED_US * 1e-6 * SLOWEST_LINK_GBS * 1e9 / (more * row_bytes))
    return min(rows, PEER_ROWS)


@dataclass(frozen=True)
class Sums:
    """One line of the table: tensors of up to so many rows, or all larger ones, and who adds them up."""

    reduction: Reduction
    up_to_rows: int | None
    because: str

    def to_json(self) -> dict[str, Any]:
        return {"reduction": self.reduction.value, "up_to_rows": self.up_to_rows, "because": self.because}


def sums_table(joined: Joined, row_bytes: int) -> list[Sums]:
    """Who adds up what, for rows of so many bytes."""
    return list(_lines(joined, row_bytes))


def _lines(joined: Joined, row_bytes: int) -> Iterator[Sums]:
    refused, rows = joined.refuses_peers(), most_rows(joined.world, row_bytes)
    because = joined.backend_because
    if refused is None and rows:
        yield Sums(Reduction.PEERS, rows, f"GPUs of one machine see each other's memory, and {_bound(joined.world)}")
    else:
        because += f"; not through peer-mapped memory: {refused or f'a row of {row_bytes} bytes is too long'}"
    yield Sums(joined.backend, None, because)


def _bound(world: int) -> str:
    if most_rows(world, 1) == PEER_ROWS and world == PEER_WORLDS[0]:
        return "between two ranks one launch sends no more than NCCL does"
    return f"up to there {world} ranks lose less to sending all to all than NCCL's rounds cost"


def sums_text(table: list[Sums], row_bytes: int) -> str:
    """The table as a person reads it."""
    names = {
        Reduction.PEERS: "one launch of ours through peer-mapped memory",
        Reduction.NCCL: "NCCL",
        Reduction.GLOO: "gloo",
    }
    found = []
    for line in table:
        size = f"up to {line.up_to_rows} rows of {row_bytes} bytes"
        if line.up_to_rows is None:
            size = "all" if len(table) == 1 else "larger ones"
        found.append(f"{size}: {names[line.reduction]} ({line.because})")
    return "; ".join(found)


def why_no_peers(gpu: Gpu) -> str | None:
    """Why cards like this one do not see each other's memory; ``None`` where those of one machine do. What a machine's
    driver says goes before this."""
    if gpu.unified:
        return "a machine has one such GPU"
    if "GeForce" in gpu.name:
        return "the driver gives GeForce cards no access to each other's memory"
    return None
