"""Plain Triton kernels of the expert layer under the interpreter: the work list, the sum over experts, the tokens."""

from __future__ import annotations

import pytest
import torch

from microscale.hardware import known
from microscale.kernels.moe.grouped_wgmma import prepare
from microscale.kernels.moe.small_batch import COLUMNS, LIST_PAIRS, combine, make_list
from microscale_lab.cases.experts import e4m3_by_token
from microscale_lab.cases.routing_twins import reference_dispatch

GPU = known("a100")  # without programmatic dependent launch, which the interpreter does not know


def wide_tokens(tokens: int, width: int) -> torch.Tensor:
    """Rows in a buffer whose margins are NaN."""
    wide = torch.full((tokens, width + 8), float("nan"), dtype=torch.bfloat16)
    wide[:, :width] = torch.randn(tokens, width, generator=torch.Generator().manual_seed(width))
    return wide[:, :width]


@pytest.mark.parametrize(
    "tokens, experts, top_k, used",
    [(1, 4, 2, 4), (3, 128, 4, 128), (8, 32, 4, 32), (17, 5, 3, 5), (64, 128, 4, 9), (64, 40, 1, 1)],
    ids=["one token", "three", "eight", "odd", "few experts used", "all on one expert"],
)
def test_the_list_is_the_dispatch(tokens: int, experts: int, top_k: int, used: int) -> None:
    scores = torch.rand(tokens, used, generator=torch.Generator().manual_seed(tokens))
    ids = scores.topk(top_k, dim=-1).indices.int().contiguous()
    x = wide_tokens(tokens, 96)
    work, scaled = make_list(x, ids, experts, GPU)
    want = reference_dispatch(ids, experts, COLUMNS)
    count = int((want.tiles[:, 0] >= 0).sum())
    assert torch.equal(work.order, want.order)
    assert torch.equal(work.offsets, want.offsets)
    assert torch.equal(work.tiles[:count], want.tiles[:count])
    assert (work.tiles[count:, 0] == -1).all()
    assert torch.equal(scaled, x * 2.0**64)


@pytest.mark.parametrize("tokens", [40, 65, LIST_PAIRS // 4])
def test_the_list_for_wgmma_prepares_tokens(tokens: int) -> None:
    ids = torch.rand(tokens, 32, generator=torch.Generator().manual_seed(0)).topk(4, dim=-1).indices.int().contiguous()
    x = wide_tokens(tokens, 96)
    work, prepared = make_list(x, ids, 32, GPU, columns=32, padded=128)
    want = reference_dispatch(ids, 32, 32)
    count = int((want.tiles[:, 0] >= 0).sum())
    assert torch.equal(work.order, want.order)
    assert torch.equal(work.offsets, want.offsets)
    assert torch.equal(work.tiles[:count], want.tiles[:count])
    assert (work.tiles[count:, 0] == -1).all()
    assert torch.equal(prepared, prepare(x, 128).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [96, 1056])
def test_combine_sums_the_parts(dtype: torch.dtype, width: int) -> None:
    parts = torch.randn(3 * 4, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    y = torch.full((3, width), float("nan"), dtype=torch.bfloat16)
    combine(parts, y, 4, GPU)
    a, b, c, d = parts.float().view(3, 4, width).unbind(1)
    want = a + b + c + d
    # The interpreter cuts bf16 off where a GPU rounds: less than one step of 2**-7.
    assert ((y.float() - want).abs() < want.abs() * 2.0**-7).all()


@pytest.mark.parametrize("width, padded", [(64, 64), (96, 128), (1056, 1088)])
def test_prepared_tokens_stand_in_fragment_order(width: int, padded: int) -> None:
    x = wide_tokens(2, width)
    out = prepare(x, padded).values
    natural = torch.zeros(2, padded)
    natural[:, :width] = x.float() * 2.0**64
    # column 8 t + 4 j + 2 c + p of each 32 stands at 16 j + 8 c + 2 t + p
    want = natural.view(2, padded // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(2, padded)
    assert torch.equal(out.float(), want)


@pytest.mark.parametrize("width, padded", [(64, 64), (96, 128), (1056, 1088)])
@pytest.mark.parametrize("magnitude", [1.0, 2.0**-100, 2.0**100], ids=["ordinary", "small", "large"])
def test_tokens_in_e4m3_have_their_own_scale(width: int, padded: int, magnitude: float) -> None:
    x = wide_tokens(3, width) * torch.tensor([[1.0], [0.001], [0.0]]) * magnitude
    x = x.bfloat16()
    prepared = prepare(x, padded, fp8=True)
    natural = torch.zeros(3, padded)
    natural[:, :width] = e4m3_by_token(x)
    # column 8 t + 4 a + 2 b + p of each 32 stands at 16 p + 4 t + 2 a + (1 - b)
    want = natural.view(3, padded // 32, 4, 2, 2, 2).permute(0, 1, 5, 2, 3, 4).flip(-1).reshape(3, padded)
    assert prepared.factors is not None
    assert torch.equal(prepared.values.float() * prepared.factors[:, None], want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_gets_a_nan_for_its_factor(bad: float) -> None:
    x = wide_tokens(2, 64).clone()
    x[1, 5] = bad
    factors = prepare(x, 64, fp8=True).factors
    assert factors is not None
    assert factors[0].isfinite()
    assert factors[1].isnan()
