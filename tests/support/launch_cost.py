"""What a launch costs the host: microseconds of one call of a bound layer, and of each of its launches.

On a GPU with everything that Triton does; elsewhere, or with ``--without-triton``, Triton's own part is left out and
what is left is ours. Two trees can be compared by turns on one machine:

    PYTHONPATH=<one tree>/src python tests/support/launch_cost.py
    PYTHONPATH=<another>/src python tests/support/launch_cost.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from microscale.formats import BLOCK, MXFP4, BlockScaled
from microscale.hardware import detect, known
from microscale.kernels import launch
from microscale.kernels.launch import Launch, taken_by
from microscale.planning import ops as backend
from microscale.planning.ops import (
    Activations,
    AttentionBatch,
    AttentionSpec,
    DenseWeights,
    Gate,
    GateKind,
    MoeWeights,
    Ops,
    PagedKv,
    RopeTable,
    Routing,
    SamplingBatch,
    SmallSpec,
)

PREFERENCE: Any = vars(backend).get("Preference") or vars(backend)["Wish"]
Work = Callable[[], object]
CALLS = 300
ROUNDS = 15


def make_work(device: str) -> dict[str, Work]:
    """Ops of a decoding step at sizes that keep a GPU ahead of the host."""
    gpu = known("h200") if device == "cpu" else detect()
    hidden, experts, top_k, head_dim = 256, 16, 4, 64

    def bf16(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def matrix(rows: int, k: int) -> BlockScaled:
        codes = torch.zeros((experts, rows, k // 2), dtype=torch.uint8, device=device)
        return BlockScaled(codes, torch.full_like(codes[..., : k // BLOCK], 120), MXFP4)

    gate = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
    biases = bf16(experts, 2 * hidden), bf16(experts, hidden)
    ops = Ops(gpu, Activations.BF16, PREFERENCE())
    bound = ops.moe(MoeWeights(matrix(2 * hidden, hidden), matrix(hidden, hidden), *biases), top_k, gate)
    norms = ops.small(SmallSpec(hidden, 8, 2, head_dim, experts, top_k, Activations.BF16, tokens=1))
    dense = ops.dense("qkv", DenseWeights(bf16(512, hidden), bf16(512)))
    spec = AttentionSpec(8, 2, head_dim, None, True, 16, Activations.BF16, 1, 256)
    attention = ops.attention("full_attention", spec, bf16(8))
    kv = PagedKv(bf16(16, 2, 16, head_dim), bf16(16, 2, 16, head_dim))
    starts = torch.arange(2, dtype=torch.int32, device=device)
    batch = AttentionBatch(starts, ints(1) + 1, ints(1, 16), 1)
    rope = RopeTable(torch.ones(head_dim // 2, device=device), 1.0)
    logits = torch.zeros((1, 4096), device=device)
    numbers, wide = torch.zeros((6, 1), device=device), torch.zeros((2, 1), dtype=torch.int64, device=device)
    # By name ``Any``: how many numbers there are, mypy cannot count.
    sampling: Any = partial(SamplingBatch, numbers[0], ints(1), *numbers[1:], *wide)
    greedy = sampling(draws=False, filters=False)
    q, qkv, weight = bf16(1, 8, head_dim), bf16(1, 12, head_dim), bf16(hidden)
    sample = ops.sampling(4096)
    refuses = getattr(attention, "why_not_fused_heads", lambda *_: None)

    def from_heads() -> object:
        return None if refuses(qkv, None, kv, batch) else attention.from_heads(qkv, rope, None, kv, batch)

    def moe(tokens: int) -> Work:
        x, ids = bf16(tokens, hidden), ints(tokens, top_k) + torch.arange(top_k, dtype=torch.int32, device=device)
        routing = Routing(ids, ids.float())
        return lambda: bound(x, routing)

    x = bf16(1, hidden)
    return {
        "add_rms_norm": lambda: norms.add_rms_norm(x, x, weight, 1e-5),
        "dense, one token": lambda: dense(x),
        "experts, one token": moe(1),
        "experts, 8 tokens": moe(8),
        "experts, 200 tokens": moe(200),
        "attention, one token": lambda: attention(q, kv, batch),
        "attention from heads": from_heads,
        "greedy token": lambda: sample(logits, greedy),
    }


def launches_of(work: Work) -> int:
    """How many kernels one call starts."""
    started: list[Launch] = []

    def count(one: Launch) -> bool:
        started.append(one)
        return False

    with taken_by(count):
        work()
    return len(started)


def microseconds(work: Work, device: str) -> float:
    """Processor time of one call: the best of many rounds, since everything that disturbs makes it longer."""
    best = float("inf")
    for _ in range(ROUNDS):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.thread_time()
        for _ in range(CALLS):
            work()
        best = min(best, time.thread_time() - start)
    return best / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--without-triton", action="store_true", help="Leave out what Triton does at a launch.")
    with_triton = torch.cuda.is_available() and not parser.parse_args().without_triton
    device = "cuda" if with_triton else "cpu"
    works = make_work(device)
    if not with_triton:
        launch._start = lambda *started: None
    for name, work in works.items():
        count = launches_of(work)
        for _ in range(20):
            work()
        us = microseconds(work, device)
        print(f"{name:24} {us:8.2f} us a call, {count} launches, {us / count:6.2f} us each")


if __name__ == "__main__":
    main()
