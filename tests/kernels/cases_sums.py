"""Sums over ranks in Triton against their references. Runs under the interpreter: the table of cases, and two processes
that share memory and really wait for each other."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from microscale import hardware
from microscale.hardware.sums import PEER_ROW_BYTES, PEER_ROWS
from microscale.kernels.sums import one_shot, reference
from microscale.kernels.sums.spec import DATA_AT, PeerBuffers
from microscale_lab.cases.case import Case, hold
from microscale_lab.cases.sums import cases

GPU = hardware.known("gb10")
SUMS = {2: 12, 4: 5}
"""Of so many ranks: more of them wait for each other the longer, on two cores."""
PATIENT_S = 200.0


@pytest.mark.parametrize("case", [case for case in cases() if not case.large], ids=lambda case: case.name)
def test_one_rank(case: Case) -> None:
    hold(case.start(GPU, "cpu")())


def part_of(rank: int, number: int) -> Tensor:
    """Rows and columns change from sum to sum, as they do between steps."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    rows, width = (1, 3, 2)[number % 3], (64, 33)[number % 2]
    return torch.randn((rows, width), generator=generator).bfloat16()


def run_rank(rank: int, buffers: tuple[Tensor, ...], told: Callable[[tuple[int, list[str]]], None]) -> None:
    peers = PeerBuffers(rank, buffers, torch.zeros(PEER_ROWS, dtype=torch.int32))
    wrong = []
    for number in range(SUMS[len(buffers)]):
        parts = [part_of(each, number) for each in range(len(buffers))]
        residual, weight = torch.ones_like(parts[0]), torch.ones(parts[0].shape[1]).bfloat16()
        if number % 4 == 3:
            _, found = one_shot.sum_add_norm(peers, parts[rank], residual, weight, 1e-5)
            _, wanted = reference.sum_add_norm(parts, residual, weight, 1e-5)
        else:
            found, wanted = one_shot.sum_rows(peers, parts[rank]), reference.sum_rows(parts)
        if not torch.equal(found, wanted):
            wrong.append(f"sum {number}")
    told((rank, wrong))


@pytest.mark.parametrize("world", SUMS)
def test_ranks_that_wait_for_each_other(world: int) -> None:
    """Each in a process of its own, over memory that all of them map."""
    size = DATA_AT + 2 * 3 * world * PEER_ROW_BYTES
    buffers = tuple(torch.zeros(size, dtype=torch.uint8).share_memory_() for _ in range(world))
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    processes = [context.Process(target=run_rank, args=(rank, buffers, answers.put)) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(PATIENT_S)
        assert [process.exitcode for process in processes] == [0] * world
        assert dict(answers.get() for _ in processes) == {rank: [] for rank in range(world)}
    finally:
        for process in processes:
            process.kill()
