"""Tiles: nothing that does not fit can be chosen; what was measured is what a card takes, and else the rules decide."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from microscale.errors import Unsupported
from microscale.hardware import KNOWN, Feature, Gpu, known
from microscale.hardware.cards import SM90, SM120
from microscale.hardware.tiles import attention, dense, experts, gemm, tuned
from microscale.hardware.tiles.experts import ExpertGemm, ExpertShape
from microscale.hardware.tiles.gemm import RESIDENT_REGISTERS, GemmPath, GemmTile, choose, possible
from microscale.hardware.tiles.thresholds import crowd
from microscale_lab.tune import candidates
from support.tile_choices import GOLDEN, table, unmeasured

CARDS = [*KNOWN.values()]
SIZES = [
    (pairs, experts, rows) for pairs in (1, 4, 65, 300, 2000, 40000) for experts in (1, 32, 128) for rows in (704, 2880)
]
GPT_OSS = ExpertShape(5760 // 16, 2880 // 64, 4, 128)


def test_the_rules_give_the_tiles_that_they_gave() -> None:
    """Tuning changes nothing here. ``python tests/support/tile_choices.py`` writes the golden again, where a rule is
    meant to change."""
    golden, found = json.loads(GOLDEN.read_text()), table()
    assert found.keys() == golden.keys()
    changed = {case: (golden[case], found[case]) for case in golden if golden[case] != found[case]}
    assert not changed


# ---- a family that nobody measured ----------------------------------------------------------------------------------


def test_wgmma_alone_means_no_measured_tile() -> None:
    h200 = known("h200")
    other = unmeasured(h200)
    assert other.has(Feature.WGMMA)
    # The rule's tile wherever the two differ; and they do differ, or this would show nothing.
    differing = 0
    for case in attention.cases():
        assert attention.choose(case, other) == attention.by_rule(case, other.family)
        differing += attention.choose(case, other) != attention.choose(case, h200)
    assert differing >= 8
    for fmt in dense.DenseFormat:
        for rows in (2880, 5120, 8192, 201088):
            tile = dense.choose(fmt, rows, 1, other)
            assert tile.registers == dense.MAX_REGISTERS
            assert tile == dense.by_rule(dense.DenseCase(fmt, 8, dense.size_of(rows, other)), other.family)
    for bits, top_k in ((4, 4), (8, 8)):
        shape = replace(GPT_OSS, bits=bits)
        for find in (experts.direct_gate_up, experts.direct_down):
            assert find(shape, 1, top_k, other) == experts.direct_by_rule(shape, 1, top_k, other)
            assert find(shape, 1, top_k, other).registers is None
            assert find(shape, 1, top_k, h200).registers is not None
    for path in GemmPath:
        assert gemm.measured_tile(path, other, 1024, 128) is None
    assert gemm.measured_tile(GemmPath.W4A16_WGMMA, h200, 1024, 128) is not None
    assert experts.with_mlp_slices(h200)
    assert not experts.with_mlp_slices(other)
    assert crowd(h200) is not None
    assert crowd(other) is None


@pytest.mark.parametrize("gpu", CARDS, ids=list(KNOWN))
def test_what_was_measured_is_what_the_card_takes(gpu: Gpu) -> None:
    for case, row in tuned.measured(attention.SECTION, gpu.family).items():
        assert attention.choose(case, gpu) == row.tile
    for heads, split in tuned.measured(attention.SPLIT_SECTION, gpu.family).items():
        assert attention.split_kv(heads.head_dim, gpu, heads.kv) == split.tile
    for size, held in tuned.measured(dense.SECTION, gpu.family).items():
        assert dense.tile_of(size, gpu) == held.tile
    rows = tuned.measured(experts.SECTION, gpu.family)
    for key, found in rows.items():
        load = int(min(key.up_to, 1e6) * gpu.num_sms)
        taken, tile = experts.find(key.gemm, key.bits, key.tokens, key.top_k_from, load, gpu)
        assert tile == found.tile or list(rows).index(taken) < list(rows).index(key)  # type: ignore[arg-type]


# ---- grouped GEMMs ---------------------------------------------------------------------------------------------------


# A resident program of MXFP8 weights takes an SM's whole shared memory where there is wgmma, and runs nowhere else.
ON_CARDS = [
    pytest.param(gpu, path, id=f"{name} {path}")
    for name, gpu in KNOWN.items()
    for path in GemmPath
    if path is not GemmPath.W8A16_WGMMA or gpu.has(Feature.WGMMA)
]


@pytest.mark.parametrize("gpu, path", ON_CARDS)
def test_all_that_may_be_chosen_fits(gpu: Any, path: GemmPath) -> None:
    allowed = set(possible(path, gpu))
    assert allowed
    for tile in allowed | set(candidates.of_gemm(path, gpu)):
        assert tile.misfit(path, gpu.family) is None
        assert tile.shared_bytes(path, gpu.family) <= gpu.shared_per_block
        assert tile.accumulators() * tile.warps * 32 < gpu.registers_per_sm
    for pairs, num_experts, rows in SIZES:
        assert choose(path, gpu, pairs, num_experts, rows) in allowed


def test_two_programs_share_an_sm_where_they_can() -> None:
    tile = choose(GemmPath.W4A8, known("gb10"), 4096, 128, 2880)
    assert 2 * (tile.shared_bytes(GemmPath.W4A8, SM120) + 1024) <= SM120.shared_per_sm


@pytest.mark.parametrize("gpu, path", ON_CARDS)
def test_tiles_grow_with_the_share_of_an_expert(gpu: Gpu, path: GemmPath) -> None:
    sizes = [choose(path, gpu, pairs, 128, 2880).block_m for pairs in (128, 4000, 8000, 40000, 1 << 20)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_few_programs_make_smaller_tiles() -> None:
    """One expert, 22 blocks of rows: with as many pairs as for many experts the card would be half empty."""
    gpu = unmeasured(known("a100"))
    few, many = (choose(GemmPath.W4A16, gpu, 128 * count, count, 2880) for count in (1, 64))
    assert few.block_m < many.block_m


def test_a_tile_that_is_too_large_says_why() -> None:
    tile = GemmTile(128, 128, 128, 8, 4)
    reason = tile.misfit(GemmPath.W8A8, SM120)
    assert reason is not None
    assert "bytes of shared memory, family sm120 offers 101376" in reason
    assert "steps of 64" in str(GemmTile(16, 128, 128, 4, 2).misfit(GemmPath.W4A16, SM90))
    assert "accumulators" in str(GemmTile(128, 128, 64, 2, 2).misfit(GemmPath.W4A16, SM90))


@pytest.mark.parametrize(
    ("tile", "reason"),
    [
        (GemmTile(256, 64, 64, 4, 4), "has 256 columns and 4 warps, with which w4a16_wgmma does not run"),
        (GemmTile(256, 192, 64, 12, 4), "has 256 columns, with 12 warps there are none so wide"),
        (GemmTile(64, 128, 64, 12, 4), "has 128 rows, with 12 warps there are 192"),
        (GemmTile(64, 256, 64, 16, 4), "has 64 columns, with 16 warps there are none so wide"),
        (GemmTile(64, 192, 64, 12, 8), None),
        (GemmTile(128, 192, 64, 12, 6), None),
        (GemmTile(256, 128, 64, 8, 3), "has 3 stages"),
        (GemmTile(256, 128, 64, 8, 8), "needs .* bytes of shared memory"),
        (GemmTile(256, 128, 64, 8, 4), None),
    ],
)
def test_resident_tiles_are_what_the_kernel_can_run(tile: GemmTile, reason: str | None) -> None:
    found = tile.misfit(GemmPath.W4A16_WGMMA, known("h200").family)
    assert found is None if reason is None else re.search(reason, found or "")


@pytest.mark.parametrize("groups", RESIDENT_REGISTERS)
def test_resident_groups_share_out_the_registers_that_there_are(groups: int) -> None:
    """A group that asks for more than the others leave waits for ever. The first that multiplies takes what is left."""
    multiplies, loads = RESIDENT_REGISTERS[groups]
    threads = 128 * (groups + 1)
    at_start = known("h200").registers_per_sm // threads // 8 * 8
    left = (groups + 1) * at_start - (groups - 1) * multiplies - loads
    assert all(number % 8 == 0 and 24 <= number <= 256 for number in (multiplies, loads, left))
    assert multiplies - 8 <= left <= multiplies


def test_mxfp8_weights_run_in_resident_programs_alone() -> None:
    h200 = known("h200")
    path = GemmPath.W8A16_WGMMA
    assert all(tile.resident(path) for tile in (*candidates.of_gemm(path, h200), *possible(path, h200)))
    reason = GemmTile(64, 128, 64, 4, 6).misfit(path, h200.family)
    assert reason == "has 64 columns and 4 warps, with which w8a16_wgmma does not run"
    with pytest.raises(
        Unsupported, match="No resident program of w8a16_wgmma fits on an SM of NVIDIA GeForce RTX 5090"
    ):
        choose(path, known("rtx5090"), 4096, 128, 2880)
    # Gemma 4's layer at 512, 2048 and 8192 tokens.
    rows = [choose(path, h200, 8 * tokens, 128, 2816).block_n for tokens in (512, 2048, 8192)]
    assert rows == [192, 192, 128]


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head_dim", "kv", "early", "reason"),
    [
        (64, attention.Kv.BF16, 2, None),
        (64, attention.Kv.BF16, 1, "has early 1, and fused_verify has keys and values of a first block early"),
        (64, attention.Kv.FP8, 2, "pays with bf16 KV and heads of 64, not fp8 KV and heads of 64"),
        (256, attention.Kv.BF16, 2, "pays with bf16 KV and heads of 64, not bf16 KV and heads of 256"),
    ],
)
def test_which_drafts_have_a_tile(head_dim: int, kv: attention.Kv, early: int, reason: str | None) -> None:
    case = attention.AttentionCase(attention.AttentionWork.FUSED_VERIFY, head_dim, kv)
    tile = attention.AttentionTile(16, 128, 8, 2, 255, early=early)
    assert attention.SECTION.misfit(case, tile, SM90) == reason
    assert (case in set(attention.cases())) == (reason is None or early == 1)


# ---- what tune measures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", CARDS, ids=list(KNOWN))
def test_what_is_measured_fits_and_holds_the_tile_in_use(gpu: Gpu) -> None:
    for case in attention.cases():
        tiles = candidates.of_attention(case, gpu)
        assert len(tiles) == len(set(tiles)) > 3
        assert {attention.choose(case, gpu), attention.by_rule(case, gpu.family)} <= set(tiles)
        assert all(attention.SECTION.misfit(case, tile, gpu.family) is None for tile in tiles)
    for fmt in dense.DenseFormat:
        for columns in dense.columns_of(fmt):
            for size in dense.sizes_of(columns):
                key = dense.DenseCase(fmt, columns, size)
                options = list(candidates.of_dense(key, gpu))
                assert len(options) == len(set(options)) > 3
                assert {dense.tile_of(key, gpu), dense.by_rule(key, gpu.family)} <= set(options)
                assert all(dense.SECTION.misfit(key, tile, gpu.family) is None for tile in options)
    for bits in (4, 8):
        shape = replace(GPT_OSS, bits=bits)
        in_use = {
            ExpertGemm.GATE_UP_DIRECT: experts.direct_gate_up(shape, 1, 4, gpu),
            ExpertGemm.DOWN_DIRECT: experts.direct_down(shape, 1, 4, gpu),
            **{gemm: experts.for_list(gemm, shape, 8, 4, gpu) for gemm in experts.LISTS},
        }
        for which, tile in in_use.items():
            found = candidates.of_experts(which, shape, gpu, tile)
            assert len(found) == len(set(found)) > 3
            assert tile in found
            misfits = [
                experts.SECTION.misfit(experts.ExpertCase(which, bits, 2, 1, 1.0), tile, gpu.family) for tile in found
            ]
            assert misfits == [None] * len(found)


def test_two_row_tiles_a_warp_where_registers_hold_them() -> None:
    """32 tokens of MXFP8 spill on SM 8.6 and 8.9 with Triton 3.6, which is not the one that is pinned."""
    case = dense.DenseCase(dense.DenseFormat.MXFP8, 32, dense.Size.CROWDED)
    found = {gpu.sm: dense.tile_of(case, gpu) for gpu in CARDS}
    assert {sm for sm, tile in found.items() if tile.row_tiles == tile.warps_n} == {86, 89}
    assert all((tile.rows, tile.warps) == (64, 4) for tile in found.values())


def test_one_wave_is_what_registers_leave() -> None:
    """Rows of gate and up end where all programs still run at once, with 7 % to spare for the kernel before, whose
    programs hold registers (88 registers, 99 % full: 24.8 us and not 20.8)."""
    h200 = known("h200")
    for key, row in tuned.measured(experts.SECTION, SM90).items():
        tile = row.tile
        if key.gemm in (ExpertGemm.GATE_UP_DIRECT, ExpertGemm.GATE_UP_WITH_MLP) and key.up_to < experts.ANY_LOAD:
            assert tile.registers is not None
            room = h200.registers_per_sm // (32 * tile.registers) // tile.slices
            assert 0.9 * room <= key.up_to <= 0.94 * room


def test_a_dense_gemm_has_half_the_accumulators() -> None:
    for gpu in CARDS:
        for path in GemmPath:
            if not path.wgmma:
                for tokens in (17, 300, 8192):
                    assert gemm.dense_tile(path, gpu, tokens, 5120, logits=False).accumulators() <= 64
                    assert gemm.dense_tile(path, gpu, tokens, 5120, logits=True).block_m <= gemm.LOGIT_TOKENS
