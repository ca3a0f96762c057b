"""Tiles that ``tune`` measures for each case: all that fit the card and have the registers for what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from microscale.hardware import Gpu
from microscale.hardware.tiles import attention, dense, experts, gemm
from microscale.hardware.tiles.tuned import measured


def of_attention(case: attention.AttentionCase, gpu: Gpu) -> list[attention.AttentionTile]:
    """What ``tune`` measures: the tile in use, the rule's, and their neighbours that fit."""
    found = {attention.choose(case, gpu): None, attention.by_rule(case, gpu.family): None}
    if case.work.decodes:
        rows = case.work.rows
        shapes = [(rows, n, warps, stages) for n in (16, 32, 64, 128) for warps in (4, 8) for stages in (2, 3)]
        shapes += [(rows, n, warps, 5) for n in (32, 64) for warps in (1, 2)]
    else:
        blocks = [(m, n) for m in (32, 64, 128) for n in (32, 64, 128)]
        shapes = [(m, n, warps, stages) for m, n in blocks for warps in (4, 8) for stages in (2, 3)]
    for m, n, warps, stages in shapes:
        # What a thread holds in float32 at least: its part of the sums and of the scores.
        held = (m * case.head_dim + m * n) // (32 * warps)
        for registers in (128, 168, 255):
            tile = attention.AttentionTile(m, n, warps, stages, registers, prefetch=n if case.work.decodes else 0)
            early = [replace(tile, prefetch=0, early=2)] if case.work.fused else []
            if case.work is attention.AttentionWork.FUSED_VERIFY:
                early.append(replace(tile, early=2))
            fits = (each for each in (tile, *early) if attention.SECTION.misfit(case, each, gpu.family) is None)
            found |= dict.fromkeys(fits if held < registers else ())
    return list(found)


def splits_per_sm(start: attention.SplitKv) -> list[attention.SplitKv]:
    """What ``tune`` measures for the splits of an SM."""
    return [replace(start, splits_per_sm=number) for number in (1, 2, 3, 4, 5, 6, 8)]


def least_keys(start: attention.SplitKv) -> list[attention.SplitKv]:
    """What ``tune`` measures for the keys of a split, added up in either way, where decode is fused or not."""
    fused = replace(start, fused_sequences=attention.EVERY)
    return [
        replace(fused, least_keys=keys, merged_inside=inside)
        for keys in (32, 64, 128, 256, 512)
        for inside in (0, attention.EVERY)
    ]


def of_dense(case: dense.DenseCase, gpu: Gpu) -> Iterator[dense.DenseTile]:
    """What ``tune`` measures."""
    many = case.size is dense.Size.MANY
    blocks = [(4, 4, 1), (8, 4, 1), (8, 8, 1)] if many else [(1, 1, 4), (1, 1, 8), (1, 1, 2)]
    if case.columns == 32 and not many:
        blocks += [(2, 1, 4), (2, 1, 2), (2, 2, 4), (4, 2, 4), (4, 2, 2)]
    words = {"bf16": 16, "mxfp4": 4, "nvfp4": 4}.get(case.format, 8)
    tokens = 32 if case.columns <= 16 else 4 * case.columns  # registers of theirs and of addresses
    seen = {dense.tile_of(case, gpu): None, dense.by_rule(case, gpu.family): None}
    for row_tiles, warps_n, slices in blocks:
        for registers in (128, 168, 255):
            for ahead in (1, 2, 3, 4):
                # One to two batches of weights, and the sums of a row tile.
                held = row_tiles // warps_n * (2 * ahead * words + case.columns // 2)
                if held + tokens <= registers:
                    seen[dense.DenseTile(case.columns, row_tiles, warps_n, slices, ahead, registers)] = None
    yield from seen


def of_experts(
    gemm: experts.ExpertGemm, shape: experts.ExpertShape, gpu: Gpu, in_use: experts.ExpertTile
) -> list[experts.ExpertTile]:
    """What ``tune`` measures: the tile in use and all that have the registers for what they keep in flight."""
    direct = gemm not in experts.LISTS
    blocks = [(1, 1, 1), (1, 1, 2)] if direct else [(4, 4, 1), (8, 8, 1), (8, 4, 1), (4, 4, 2), (2, 2, 1)]
    limits = (None, 80, 128, 168, 255) if direct else (None, 80, 96, 128, 168)
    found = {in_use: None}
    for row_tiles, warps_n, slices in blocks:
        for registers in limits:
            for ahead in (1, 2, 3, 4, 5, 6, 8, 9):
                # One to two batches of a warp: of a row tile and a K tile a thread has 4 words of MXFP4, 8 of MXFP8,
                # and a scale.
                held = 2 * ahead * (shape.bits + 1) * row_tiles // warps_n
                if held + 40 <= (registers or experts.MAX_REGISTERS) and ahead <= -(-shape.k_tiles // slices):
                    found[experts.ExpertTile(row_tiles, warps_n, slices, ahead, registers)] = None
    return list(found)


def of_experts_with_mlp(case: experts.ExpertCase, k_tiles: int, gpu: Gpu) -> list[experts.ExpertTile]:
    """The same for a GEMM with an MLP in its launch, the tile in use first if there is one. Its programs have one row
    tile; those of ``DOWN_WITH_MLP`` have a warp for each expert and no slices. Registers always have a limit: they
    decide what is one wave."""
    row = measured(experts.SECTION, gpu.family).get(case)
    found = {} if row is None else {row.tile: None}
    for slices in (1, 2) if case.gemm is experts.ExpertGemm.GATE_UP_WITH_MLP else (1,):
        for registers in (128, 80, 96, 168, 255):
            for ahead in (2, 1, 3, 4, 5, 6):
                if 2 * ahead * (case.bits + 1) + 40 <= registers and ahead <= -(-k_tiles // slices):
                    found[experts.ExpertTile(1, 1, slices, ahead, registers)] = None
    return list(found)


def of_gemm(path: gemm.GemmPath, gpu: Gpu) -> Iterator[gemm.GemmTile]:
    """What ``tune`` measures: every combination that fits.

    On wgmma 128 rows only, and 4 warps unless resident: 64 and 256 rows and 8 warps were slower at every size (H200,
    gpt-oss-120b).
    """
    if path.wgmma:
        shapes = [(m, 128, 4) for m in path.passing_block_ms]
        shapes += [(m, 64 * groups, 4 * groups) for groups, sizes in gemm.RESIDENT_BLOCK_MS.items() for m in sizes]
        tiles = (
            gemm.GemmTile(m, rows, path.block_k, warps, n)
            for m, rows, warps in shapes
            for n in reversed(gemm.WGMMA_STAGES)
        )
        yield from (tile for tile in tiles if tile.misfit(path, gpu.family) is None)
        return
    for block_m in gemm.BLOCK_MS:
        for block_n in (64, 128):
            for warps in (4, 8):
                for stages in range(2, gemm.MAX_STAGES + 1):
                    tile = gemm.GemmTile(block_m, block_n, path.block_k, warps, stages)
                    if tile.misfit(path, gpu.family) is None and tile.accumulators() >= 4:
                        yield tile
