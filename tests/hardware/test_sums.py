"""Which way sums over ranks go, and the arithmetic behind it."""

from __future__ import annotations

import pytest

from microscale.hardware import KNOWN, known
from microscale.hardware.sums import (
    PEER_ROW_BYTES,
    PEER_ROWS,
    SAVED_US,
    SLOWEST_LINK_GBS,
    Joined,
    Reduction,
    most_rows,
    sums_table,
    sums_text,
    why_no_peers,
)

ROW = 5760


@pytest.mark.parametrize(
    ("joined", "ways", "said"),
    [
        (Joined(2), [(Reduction.PEERS, 64), (Reduction.NCCL, None)], "sends no more than NCCL"),
        (Joined(8), [(Reduction.PEERS, 8), (Reduction.NCCL, None)], "8 ranks lose less"),
        (Joined(3), [(Reduction.NCCL, None)], "2, 4, 8 ranks, not for 3"),
        (Joined(2, one_machine=False), [(Reduction.NCCL, None)], "GPUs of several machines"),
        (Joined(2, unmapped="GPU 0 is shy"), [(Reduction.NCCL, None)], "GPU 0 is shy"),
        (Joined(2, own_gpus=False), [(Reduction.PEERS, 64), (Reduction.GLOO, None)], "no two ranks on one GPU"),
        (Joined(2, on_gpus=False, own_gpus=False), [(Reduction.GLOO, None)], "ranks on a CPU"),
    ],
)
def test_the_table(joined: Joined, ways: list[tuple[Reduction, int | None]], said: str) -> None:
    table = sums_table(joined, ROW)
    assert [(line.reduction, line.up_to_rows) for line in table] == ways
    text = sums_text(table, ROW)
    assert said in text
    assert text.startswith("all: " if len(ways) == 1 else "up to ")


def test_rows_that_are_too_long_go_by_the_library() -> None:
    [line] = sums_table(Joined(2), PEER_ROW_BYTES + 2)
    assert line.reduction is Reduction.NCCL
    assert "too long" in line.because


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("row_bytes", [64, ROW, PEER_ROW_BYTES])
def test_the_bound_is_where_both_take_as_long(world: int, row_bytes: int) -> None:
    rows = most_rows(world, row_bytes)
    assert 0 < rows <= PEER_ROWS

    def lost_us(rows: int) -> float:
        """What sending all to all takes longer than a ring."""
        return rows * row_bytes * ((world - 1) - 2 * (world - 1) / world) / (SLOWEST_LINK_GBS * 1e3)

    assert lost_us(rows) <= SAVED_US
    assert rows == PEER_ROWS or lost_us(rows + 1) > SAVED_US


def test_every_known_card_says_whether_it_sees_others() -> None:
    apart = {name for name in KNOWN if why_no_peers(known(name)) is not None}
    assert apart == {"rtx3090", "rtx4090", "rtx5090", "gb10"}
