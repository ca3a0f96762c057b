"""Graphs are captured while the device is busy with those before, and give what the work gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from microscale.engine.graph_sizes import decode_key
from microscale.engine.graphs import Graphs

DEVICE = torch.device("cuda")
KEYS = 12
CYCLES = 4_000_000_000
"""Of a kernel that only waits: two seconds, a hundred captures."""


class Stopped(Exception):
    """The work is given up."""


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_captured_beside_running_work_is_right(waits: bool) -> None:
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=waits)
    x = torch.arange(1 << 16, dtype=torch.float32, device=DEVICE)
    weight = torch.eye(256, device=DEVICE) * 2

    def work(key: int) -> Tensor:
        return (x.view(-1, 256) @ weight + key).flatten().contiguous()

    def stopped() -> Tensor:
        work(0)
        raise Stopped

    found = [graphs.run(decode_key(1, 1), partial(work, -1)).clone()]
    busy = torch.randn(4096, 4096, device=DEVICE)
    for key in range(KEYS):
        busy = (busy @ busy).clamp_(-1, 1)
        found.append(graphs.run(decode_key(1, 2 + key), partial(work, key)).clone())
        if key % 4 == 1:
            with pytest.raises(Stopped):
                graphs.run(decode_key(1, 1000 + key), stopped)
    for key in (3, 0, KEYS - 1):
        found.append(graphs.run(decode_key(1, 2 + key), lambda: pytest.fail("captured again")).clone())
    expected = [-1, *range(KEYS), 3, 0, KEYS - 1]
    for key, each in zip(expected, found, strict=True):
        assert torch.equal(each, 2 * x + key), key


@dataclass(frozen=True)
class Rows:
    values: Tensor
    count: int


def test_graphs_share_the_memory_of_their_results() -> None:
    """512 rows of gpt-oss's logits are 412 MB; a graph of each size would keep its own."""
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=False)
    x = torch.arange(1 << 20, dtype=torch.float32, device=DEVICE)

    def work(rows: int) -> Rows:
        return Rows((x + torch.arange(rows, device=DEVICE)[:, None])[:, 1:], rows)

    sizes = [64, 48, 32, 16, 8]
    for rows in (64, *sizes):  # the first is launched
        graphs.run(decode_key(rows, 1), partial(work, rows))
        if rows == 64:
            torch.cuda.synchronize()
            reserved = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() - reserved < 64 << 20, "less than the 416 MiB of the other results"
    again: Callable[[], Rows] = lambda: pytest.fail("captured again")
    for rows in (8, 64, 16, 48, 32, 8):
        found = graphs.run(decode_key(rows, 1), again)
        assert found.count == rows
        assert torch.equal(found.values, work(rows).values)


def test_a_capture_does_not_wait_for_the_device() -> None:
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=False)
    x = torch.zeros(1024, device=DEVICE)
    for pages in (1, 2):  # the first is launched, and the first capture waits
        graphs.run(decode_key(1, pages), lambda: x + 1)
    torch.cuda._sleep(CYCLES)
    behind = torch.cuda.Event()
    behind.record()
    graphs.run(decode_key(1, 3), lambda: x + 1)
    assert not behind.query()
    torch.cuda.synchronize()
    assert behind.query()


@pytest.mark.parametrize("plenty", [0, 1 << 60])
def test_torchs_cache_is_emptied_only_where_memory_is_short(plenty: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To free memory waits for the device."""
    graphs = Graphs(DEVICE, lambda tokens: None, enabled=True, waits=False)
    x = torch.zeros(1024, device=DEVICE)
    for pages in (1, 2):
        graphs.run(decode_key(1, pages), lambda: x + 1)
    emptied: list[int] = []
    monkeypatch.setattr("microscale.engine.graphs.PLENTY", plenty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    graphs.run(decode_key(1, 3), lambda: x + 2)
    assert len(emptied) == (plenty > 0)
