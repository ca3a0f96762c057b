"""How a program of the small-batch experts finds its tile: the jit code, compiled and executed on a CPU, against the
list that ``list_small_batch`` would make."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from microscale import settings as microscale_settings
from microscale.errors import Unsupported
from microscale.hardware import KNOWN, Gpu, known
from microscale.kernels.launch import Kernel, launch
from microscale.kernels.moe.paths import OWN_LIST
from microscale.kernels.moe.small_batch import COLUMNS, OWN_LIST_TOKENS, OWN_LIST_TOP_K, own_list
from microscale.kernels.moe.spec import Activations, Gate, GateKind, MoeSpec
from microscale.planning.shards import record_moe
from microscale_lab.cases.routing_twins import reference_dispatch
from microscale_lab.prove.bridge import proof_kernel
from ptxproof.cache import PtxCache
from support.interpreted import interpreted
from support.own_tile_jit import tiles_of
from support.tile_choices import unmeasured

GPU = known("gb10")
GPT_OSS = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)


def found(ids: Tensor, num_experts: int) -> Tensor:
    work, _ = own_list(ids, ids, num_experts, GPU)
    out = torch.full((work.tiles, 17), -7, dtype=torch.int32)
    constants = {"TOP_K": ids.shape[1], "EXPERT_WORDS": work.expert_words, "WARPS": 4}
    with interpreted(GPU.sm):
        launch(tiles_of, (work.tiles,), (ids, out, ids.shape[0]), constants, {"num_warps": 4})
    return out


def check(ids: Tensor, num_experts: int) -> None:
    """The tiles are the list's, in its order; only that a column is its token and not its place."""
    top_k = ids.shape[1]
    want = reference_dispatch(ids, num_experts, COLUMNS)
    out = found(ids, num_experts)
    assert torch.equal(out[:, 0], want.tiles[: len(out), 0])
    for row, (expert, first, count, _) in zip(out.tolist(), want.tiles.tolist(), strict=False):
        if expert < 0:
            continue
        pairs = want.order[first : first + count].tolist()
        assert [pair for pair in row[1:9] if pair >= 0] == pairs
        tokens = [pair // top_k for pair in pairs]
        assert [n for n, pair in enumerate(row[1:9]) if pair >= 0] == tokens
        assert row[9:] == [n if n in tokens else tokens[0] for n in range(8)]


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Ids of 1 to 8 tokens, each of which names an expert once. Few kinds of sizes: each is a kernel to compile."""
    num_experts, top_k = draw(st.sampled_from([(32, 4), (128, 4), (128, 8), (70, 3), (5, 1), (512, 15)]))
    used = draw(st.integers(top_k, num_experts))
    rows = st.lists(st.integers(num_experts - used, num_experts - 1), min_size=top_k, max_size=top_k, unique=True)
    ids = draw(st.lists(rows, min_size=1, max_size=OWN_LIST_TOKENS))
    return torch.tensor(ids, dtype=torch.int32), num_experts


@settings(max_examples=60, deadline=None)
@given(choices())
def test_every_program_finds_its_tile(chosen: tuple[Tensor, int]) -> None:
    check(*chosen)


@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_all_on_one_expert_and_all_apart(top_k: int) -> None:
    check(torch.arange(top_k, dtype=torch.int32).repeat(8, 1) + 96, 128)
    check(torch.arange(8 * top_k, dtype=torch.int32).flip(0).view(8, top_k).contiguous() * 2, 128)


def test_what_does_not_fit_is_refused() -> None:
    for tokens, top_k in ((OWN_LIST_TOKENS + 1, 4), (3, OWN_LIST_TOP_K + 1)):
        ids = torch.zeros(tokens, top_k, dtype=torch.int32)
        with pytest.raises(Unsupported, match="find their tiles for up to 8 tokens with 15 experts"):
            own_list(ids, ids, 32, GPU)
        spec = MoeSpec(32, top_k, 96, 96, "mxfp4", Activations.BF16, GPT_OSS, True, tokens)
        assert OWN_LIST.supports(spec, GPU) is not None


def gpt_oss(gpu: Gpu, *tokens: int) -> dict[str, Kernel]:
    spec = MoeSpec(32, 4, 2880, 2880, "mxfp4", Activations.BF16, GPT_OSS, True, 1)
    kernels = list(record_moe(spec, gpu, tokens))
    assert len({kernel.short_name for kernel in kernels}) == len(kernels), "sizes of one path share their kernels"
    return {kernel.short_name: kernel for kernel in kernels}


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
def test_no_list_is_made_for_few_tokens(gpu: Gpu) -> None:
    for tokens in range(3, 9):
        assert gpt_oss(gpu, tokens).keys() == {"gate_up_small", "down_small", "combine"}
    assert gpt_oss(unmeasured(gpu), *range(3, 9)).keys() == {"gate_up_small", "down_small", "combine"}
    assert gpt_oss(gpu, 9, 10).keys() == {"list_small_batch", "gate_up_small", "down_small", "combine"}


@pytest.mark.parametrize("card", ["a100", "h200"])
def test_finding_a_tile_takes_no_barrier(card: str) -> None:
    """Every reduction is one instruction of a warp, and nothing passes through shared memory."""
    gpu = known(card)
    for name in ("gate_up_small", "down_small"):
        kernel = gpt_oss(gpu, 4)[name]
        ptx, shared = PtxCache(microscale_settings.load().cache_dir).compiled(proof_kernel(kernel), gpu.sm)
        assert kernel.constants["EXPERT_WORDS"] == 1
        assert shared == 0
        assert ptx.count("redux.sync") == 3
        for other in ("bar.sync", "barrier", "shfl.", "st.shared"):
            assert other not in ptx
