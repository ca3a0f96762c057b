"""The small ops in Triton against their references. Runs under the interpreter, or on a GPU where there is one."""

from __future__ import annotations

import math

import pytest
import torch

from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.small import reference
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.spec import RopeTable
from support.errors import assert_close, rms_step, step

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def bf16_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Both compute in float32 from the same bf16 and round once. ``worst`` counts the largest element with its size."""
    spread = float(expected.abs().max() / expected.float().square().mean().sqrt())
    assert_close(actual, expected, worst=2 * step("bf16") * spread, rms=2 * rms_step("bf16"))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("width", [32, 160, 704, 2816, 2880])
def test_rms_norm(tokens: int, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    padded = torch.full((tokens, width + 16), math.nan).bfloat16()
    padded[:, :width] = torch.randn(tokens, width, generator=generator) * 5
    x, weight = padded.to(DEVICE)[:, :width], torch.randn(width, generator=generator).bfloat16().to(DEVICE)
    bf16_close(TritonSmall().rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_nothing_and_of_zeros() -> None:
    weight = torch.ones(64, dtype=torch.bfloat16, device=DEVICE)
    assert TritonSmall().rms_norm(torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE), weight, 1e-5).shape == (
        0,
        64,
    )
    zeros = torch.zeros(2, 64, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(TritonSmall().rms_norm(zeros, weight, 1e-5), zeros)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "page_size"),
    [
        (1, 64, 8, 64, 16),
        (5, 4, 2, 32, 16),
        (3, 6, 3, 128, 1),
        (2, 16, 2, 512, 32),
        (4, 9, 1, 64, 128),
        (0, 4, 2, 64, 16),
    ],
)
def test_rope_and_write_kv(tokens: int, heads: int, kv_heads: int, head_dim: int, page_size: int) -> None:
    generator = torch.Generator().manual_seed(heads)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, head_dim, generator=generator).bfloat16().to(DEVICE)
    table = RopeTable((1.0 / 150000 ** (torch.arange(head_dim // 2) / (head_dim // 2))).to(DEVICE), 1.3466)
    positions = torch.randint(0, 4000, (tokens,), generator=generator).to(DEVICE)
    pages = 3 + tokens // page_size
    slots = torch.randperm(pages * page_size, generator=generator)[:tokens].to(DEVICE)
    shape = (pages, kv_heads, page_size, head_dim)
    ours, theirs = (PagedKv(*(torch.full(shape, -7.0).bfloat16().to(DEVICE) for _ in range(2))) for _ in range(2))
    q = TritonSmall().rope_and_write_kv(qkv, heads, positions, table, ours, slots)
    want = reference.rope_and_write_kv(qkv, heads, positions, table, theirs, slots)
    assert q.shape == (tokens, heads, head_dim)
    if tokens:
        bf16_close(q, want)
        bf16_close(ours.k, theirs.k)
    assert torch.equal(ours.v, theirs.v)
    untouched = theirs.k == -7.0
    assert torch.equal(ours.k[untouched], theirs.k[untouched])


@pytest.mark.skipif(not ON_GPU, reason="angles of 131072 radians: the interpreter uses numpy's cosine, not the GPU's")
def test_rope_far_out() -> None:
    """cos and sin of large angles: float32 angles are exact to 2**-8 there, and the reduction must be as good."""
    positions = torch.tensor([131071, 100003], device=DEVICE)
    qkv = torch.randn(2, 10, 64, device=DEVICE).bfloat16()
    table = RopeTable((1.0 / 150000 ** (torch.arange(32, device=DEVICE) / 32)), 1.3466)
    kv = PagedKv(*(torch.zeros(1, 1, 16, 64, device=DEVICE).bfloat16() for _ in range(2)))
    slots = torch.tensor([0, 1], device=DEVICE)
    bf16_close(
        TritonSmall().rope_and_write_kv(qkv, 8, positions, table, kv, slots),
        reference.rope_and_write_kv(qkv, 8, positions, table, kv, slots),
    )
