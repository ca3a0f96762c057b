"""Experts with a dense MLP in their launches, without a GPU: what the kernels rely on. They run in ``tests/gpu``."""

from __future__ import annotations

import pytest
import torch

from microscale.errors import Unsupported
from microscale.formats import MXFP8, BlockScaled, encode
from microscale.hardware import KNOWN, Gpu, known
from microscale.hardware.tiles.experts import with_mlp_slices
from microscale.kernels import layouts
from microscale.kernels.dense.packed import pack
from microscale.kernels.dense.spec import DenseWeights
from microscale.kernels.layouts import RowOrder
from microscale.kernels.moe import with_mlp
from microscale.models.config import LayerKind
from microscale.models.families import PRESETS
from microscale.models.gemma4.model import in_runs
from microscale.models.recorded import Step, bind_shapes, run_step
from microscale.planning.ops import Activations, Ops, Preference, recording


def test_an_mlp_in_runs_has_the_row_tiles_of_an_expert() -> None:
    """The same words and scales as an expert of that size: gates in the upper half of a tile, ups in the lower."""
    gate_up = encode(torch.randn(2 * 48, 160, generator=torch.Generator().manual_seed(0)), MXFP8)
    ours = in_runs(gate_up)
    assert isinstance(ours, BlockScaled)
    dense = pack(DenseWeights(ours))
    expert = layouts.pack(BlockScaled(gate_up.values[None], gate_up.scales[None], MXFP8), RowOrder.HALVES)
    assert torch.equal(dense.weight, expert.words[0])
    assert dense.groups is not None
    assert torch.equal(dense.groups, expert.scales[0])


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
def test_one_wave_where_it_is_served(gpu: Gpu) -> None:
    """One and two tokens of Gemma 4: 88 row tiles for each of 8 experts, 264 of the MLP. Two tokens are more than one
    wave on an H20, which has 78 SMs."""
    for tokens in (1, 2):
        if not with_mlp_slices(gpu):
            with pytest.raises(Unsupported, match="No tile of gate_up_with_mlp was measured"):
                with_mlp._first(2816, 1408, 4224, tokens, 8, {}, gpu)
            continue
        constants, options = with_mlp._first(2816, 1408, 4224, tokens, 8, {}, gpu)
        assert (constants["ROW_TILES"], constants["MLP_TILES"]) == (88, 264)
        warps = options["num_warps"] * (tokens * 8 * 88 + 264)
        if (gpu.name, tokens) != ("NVIDIA H20", 2):
            assert warps <= gpu.num_sms * (gpu.registers_per_sm // (32 * options["maxnreg"])), tokens


@pytest.mark.parametrize("gpu", KNOWN.values(), ids=KNOWN)
def test_a_model_with_both_starts_them_where_they_are_served(gpu: Gpu) -> None:
    model = bind_shapes(PRESETS["gemma-4-26b-a4b"], Ops(gpu, Activations.BF16, Preference()))
    for tokens in (1, 2, 3):
        with recording() as found:
            run_step(model, Step(tokens, tokens, 1, 8), model.new_cache(dict.fromkeys(LayerKind, 4)))
        served = sum(kernel.module == "with_mlp" for kernel in found)
        assert served == (2 if with_mlp_slices(gpu) and tokens <= with_mlp.MAX_TOKENS else 0)


def test_walks_have_no_empty_slice() -> None:
    for k, slices in ((2816, 2), (2112, 4), (704, 1), (352, 2), (160, 2)):
        assert with_mlp._whole(k, slices)
    assert not with_mlp._whole(64, 2)
    first, _ = with_mlp._first(160, 64, 96, 1, 3, {}, known("h200"))
    assert first["AHEAD"] == 2  # three tiles of 64 in two slices
