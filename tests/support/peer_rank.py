"""One of several ranks on one GPU that add up through each other's memory: ``support.peer_rank RANK WORLD STORE``.

Captures sums in a CUDA graph, replays it with other numbers each time, and holds every sum against that of the parts in
the order of the ranks, bit for bit. Prints what it does on stderr, and a JSON object on stdout at the end.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time

import torch
from torch import Tensor

from microscale.backends.peer_ranks import PeerRanks
from microscale.engine.ranks.summing import agree_on_sums
from microscale.hardware.sums import Joined
from microscale.kernels.sums import reference
from microscale.parallel.group import Group, meet_at
from microscale.parallel.sharding import Shard
from microscale.parallel.transport import Transport

SHAPES = ((1, 2880), (4, 2880), (3, 161), (64, 2880))
REPLAYS = 1000
EPSILON = 1e-5
STUCK_S = 240.0


class Numbers:
    """Standing inputs of all ranks, filled anew before each replay; each rank knows everybody's."""

    def __init__(self, world: int, device: torch.device) -> None:
        self._generator = torch.Generator(device=device)
        self.parts = [
            [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(world)] for shape in SHAPES
        ]
        self.residuals = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in SHAPES]
        self.weights = [torch.zeros(shape[1], dtype=torch.bfloat16, device=device) for shape in SHAPES]

    def fill(self, seed: int) -> None:
        self._generator.manual_seed(seed)
        for tensor in (*(part for parts in self.parts for part in parts), *self.residuals, *self.weights):
            tensor.normal_(0.0, 3.0, generator=self._generator)


def add_up(ranks: PeerRanks, numbers: Numbers, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each shape: the sum alone, then the stream and its norm."""
    found = []
    for parts, residual, weight in zip(numbers.parts, numbers.residuals, numbers.weights, strict=True):
        total = ranks.sum(parts[rank])
        normed, stream = ranks.sum_add_norm(parts[rank], residual, weight, EPSILON)
        found.append((total, stream, normed))
    return found


def differing(numbers: Numbers, found: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """Numbers that are wrong: of sums, of streams, and of norms by more than two steps of bf16."""
    wrong = torch.zeros(3, dtype=torch.int64, device=found[0][0].device)
    for at, (total, stream, normed) in enumerate(found):
        parts, residual, weight = numbers.parts[at], numbers.residuals[at], numbers.weights[at]
        want_normed, want_stream = reference.sum_add_norm(parts, residual, weight, EPSILON)
        wrong[0] += (total != reference.sum_rows(parts)).sum()
        wrong[1] += (stream != want_stream).sum()
        wrong[2] += ((normed.float() - want_normed.float()).abs() > 2.0**-6 * want_normed.float().abs() + 1e-6).sum()
    return wrong


def main() -> None:
    rank, world, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"rank {rank} after {time.monotonic() - began:.1f} s: {text}", file=sys.stderr, flush=True)

    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    group = Group(Shard(rank, world), meet_at(store, world, Transport.GLOO), device)
    say(f"met, torch {torch.__version__} on {torch.cuda.get_device_name(device)}")
    ranks, joined = agree_on_sums(group, Joined(world, own_gpus=False), device)
    assert isinstance(ranks, PeerRanks), joined.refuses_peers()
    say("mapped the others' memory")
    numbers = Numbers(world, device)
    numbers.fill(0)
    wrong = differing(numbers, add_up(ranks, numbers, rank))
    say(f"summed without a graph; wrong numbers of sums, streams, norms: {wrong.tolist()}")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = add_up(ranks, numbers, rank)
    say("captured")
    first_wrong = None
    start = time.monotonic()
    for replay in range(1, REPLAYS + 1):
        numbers.fill(replay)
        graph.replay()
        wrong += differing(numbers, found)
        if replay % 100 == 0:
            torch.cuda.synchronize()
            if first_wrong is None and int(wrong.sum()):
                first_wrong = replay
            say(f"{replay} replays; wrong so far: {wrong.tolist()}")
    seconds = time.monotonic() - start
    group.sum(torch.zeros(1, device=device))  # nobody leaves while another may write
    told = {
        "rank": rank,
        "wrong": wrong.tolist(),
        "wrong_by_replay": first_wrong,
        "replays": REPLAYS,
        "sums": REPLAYS * 2 * len(SHAPES),
        "ms_a_replay": round(seconds / REPLAYS * 1e3, 3),
        "uses": ranks._peers.epochs[:4].tolist(),
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
