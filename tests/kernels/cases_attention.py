"""Paged attention in Triton against the reference. Runs under the interpreter, or on a GPU where there is one.

Inputs are bf16 in both, so what differs is the rounding of the softmax's weights to bf16 before they meet the values,
of the output to bf16, and sums in another order. Slots that no query may see hold NaN.
"""

from __future__ import annotations

import math

import pytest
import torch

from microscale import hardware
from microscale.kernels.attention.paged import HEAD_DIMS, PagedAttention, choose_splits, choose_tile
from microscale.kernels.attention.reference import attention
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.op import Activations
from support.errors import assert_close, rms_step, step

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GPU = hardware.detect() if ON_GPU else hardware.known("rtx5090")


def make_case(
    heads: int, kv_heads: int, dim: int, window: int | None, page_size: int, sequences: list[tuple[int, int]], fp8: bool
) -> tuple[AttentionSpec, torch.Tensor, PagedKv, AttentionBatch]:
    """``sequences`` are (cached, new) lengths. Pages are handed out in random order."""
    generator = torch.Generator().manual_seed(sum(c + n for c, n in sequences) + dim)
    lens = [cached + new for cached, new in sequences]
    counts = [-(-n // page_size) for n in lens]
    pages = torch.randperm(sum(counts) + 2, generator=generator).int().tolist()
    shape = (len(pages), kv_heads, page_size, dim)
    k, v = (torch.full(shape, math.nan) for _ in range(2))
    table = torch.full((len(sequences), max(counts)), pages.pop(), dtype=torch.int32)
    for seq, (cached, new) in enumerate(sequences):
        for index in range(counts[seq]):
            table[seq, index] = pages.pop()
        lowest = 0 if window is None else max(0, cached - window + 1)
        position = torch.arange(lowest, cached + new)
        page, slot = table[seq, position // page_size].long(), position % page_size
        for cache in (k, v):
            cache[page, :, slot] = torch.randn(len(position), kv_heads, dim, generator=generator)
    starts = torch.tensor([0, *(n for _, n in sequences)]).cumsum(0).int()
    q = torch.randn(int(starts[-1]), heads, dim, generator=generator).bfloat16() * 2
    spec = AttentionSpec(heads, kv_heads, dim, window, True, page_size, Activations.BF16, q.shape[0], max(lens))
    batch = AttentionBatch(
        starts.to(DEVICE), torch.tensor(lens).int().to(DEVICE), table.to(DEVICE), max(n for _, n in sequences)
    )
    if fp8:
        scales = [torch.rand(kv_heads, generator=generator) + 0.5 for _ in range(2)]
        codes = [(c / s[None, :, None, None]).to(torch.float8_e4m3fn) for c, s in zip((k, v), scales, strict=True)]
        kv = PagedKv(*(c.view(torch.uint8).to(DEVICE) for c in codes), *(s.to(DEVICE) for s in scales))
    else:
        kv = PagedKv(k.bfloat16().to(DEVICE), v.bfloat16().to(DEVICE))
    return spec, q.to(DEVICE), kv, batch


CASES = [
    # heads, kv_heads, dim, window, page_size, [(cached, new), …]
    (8, 1, 64, None, 16, [(0, 1)]),
    (8, 1, 64, None, 16, [(300, 1), (0, 1), (17, 1), (64, 1)]),
    (16, 2, 64, 128, 32, [(700, 1), (127, 1), (128, 1), (5, 1)]),
    (4, 4, 64, 1, 16, [(90, 1), (3, 1)]),
    (6, 2, 64, 7, 16, [(40, 1), (6, 1), (7, 1)]),
    (8, 1, 64, None, 16, [(0, 37)]),
    (16, 2, 64, 7, 16, [(0, 50), (33, 20), (100, 1), (0, 1)]),
    (4, 2, 64, 128, 64, [(0, 200), (150, 30)]),
    (10, 2, 64, None, 128, [(130, 5), (0, 3), (7, 1)]),
    (2, 1, 128, 40, 16, [(70, 9), (200, 1)]),
    (4, 2, 256, None, 16, [(20, 3), (50, 1)]),
    (8, 1, 512, 30, 16, [(33, 1), (12, 1)]),
    (16, 1, 64, 20, 16, [(10, 30), (0, 0), (25, 4)]),
]
if ON_GPU:
    CASES += [
        (64, 8, 64, None, 16, [(8191, 1), (131071, 1), (1, 1)]),
        (64, 8, 64, 128, 64, [(131071, 1), (4095, 1)]),
        (64, 8, 64, None, 16, [(0, 2048), (1000, 500), (3000, 1), (77, 1)]),
        (64, 8, 64, 128, 16, [(0, 2048), (1000, 500), (3000, 1), (77, 1)]),
        (16, 2, 512, None, 16, [(0, 500), (1000, 100)]),
        (16, 8, 256, 1024, 32, [(0, 1500), (5000, 1)]),
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sink", [None, 0.0, 30.0, -30.0])
def test_triton_is_the_reference(case: tuple, fp8: bool, sink: float | None) -> None:
    if sink is not None and sink != 0.0 and fp8 and not ON_GPU:
        return  # the interpreter is slow; sinks and fp8 do not meet in the code
    spec, q, kv, batch = make_case(*case, fp8)
    implementation = PagedAttention()
    assert implementation.supports(spec, GPU) is None
    noise = torch.randn(spec.num_heads, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sinks = None if sink is None else (sink + noise).bfloat16()
    want = attention(q, kv, batch, spec, sinks)
    out = implementation.run(spec, GPU, q, kv, batch, sinks)
    assert out.dtype == torch.bfloat16
    if sink == 30.0:
        # The sink takes nearly all weight: outputs are tiny, and so is their scale.
        assert float(want.abs().max()) < 1e-3
    # Two roundings to bf16, of weights and outputs, and room for the sums. `worst` is relative to the largest output.
    spread = float(want.abs().max() / want.square().mean().sqrt())
    assert_close(out, want, worst=3 * step("bf16") * spread, rms=3 * rms_step("bf16"))


def test_splits_fill_the_machine_and_never_starve() -> None:
    assert choose_splits(1, 8, 8192, 128, hardware.known("h200")) == 32
    assert choose_splits(64, 8, 8192, 128, hardware.known("h200")) == 2
    assert choose_splits(256, 8, 8192, 128, hardware.known("h200")) == 1
    assert choose_splits(1, 8, 128, 128, hardware.known("h200")) == 1


def test_every_tile_fits_every_card() -> None:
    for gpu in hardware.KNOWN.values():
        for head_dim in HEAD_DIMS:
            for fp8 in (False, True):
                for decode in (False, True):
                    tile = choose_tile(decode, head_dim, fp8, gpu)
                    assert tile.shared_bytes(head_dim, 1 if fp8 else 2) <= gpu.shared_per_block
