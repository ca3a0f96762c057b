"""Every tile, register limit and threshold that the rules of ``hardware`` give a card where nothing was measured.

The golden ``tests/golden/tiles.json`` holds it for many shapes. It must not change unless a rule is meant to change;
what was measured (``hardware/tuned``) may change with every tuning, and is not in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from microscale.hardware import KNOWN, REPRESENTATIVES, Feature, Gpu
from microscale.hardware.tiles import attention, dense, experts, gemm
from microscale.hardware.tiles.attention import HEAD_DIMS
from microscale.hardware.tiles.gemm import GemmPath
from microscale.hardware.tiles.thresholds import ThresholdName, crowd, threshold
from microscale.kernels.dense import small_batch
from microscale.kernels.moe import with_mlp
from microscale.kernels.numbers import cdiv, next_power_of_2

GOLDEN = Path(__file__).parents[1] / "golden" / "tiles.json"
# gate_up rows x k, down rows x k, top_k: gpt-oss and its shards, Gemma 4, Qwen3, the embedded model, a tiny one
EXPERTS = [
    (5760, 2880, 2880, 2880, 4), (2880, 2880, 2880, 1440, 4), (6144, 2880, 2880, 3072, 4),
    (1408, 2816, 2816, 704, 8), (1536, 2048, 2048, 768, 8), (512, 256, 256, 256, 4), (64, 64, 64, 32, 2),
]  # fmt: skip
NUM_EXPERTS = 128


def show(*values: int | None) -> str:
    return " ".join("-" if value is None else str(int(value)) for value in values)


def choices(gpu: Gpu) -> Iterator[tuple[str, str]]:
    """(case, what is chosen)."""
    yield from _gemms(gpu)
    yield from _attention(gpu)
    yield from _experts(gpu)
    yield from _dense(gpu)
    yield "thresholds", _thresholds(gpu)


def _gemms(gpu: Gpu) -> Iterator[tuple[str, str]]:
    resident = GemmPath.W8A16_WGMMA  # a program takes all shared memory of an SM that has wgmma
    paths = [path for path in GemmPath if path is not resident or gpu.has(Feature.WGMMA)]
    sizes = product(paths, (1, 32, 128), (704, 2880), (1, 65, 300, 2000, 16384, 40000))
    for path, num_experts, rows, pairs in sizes:
        tile = gemm.choose(path, gpu, pairs, num_experts, rows)
        numbers = [getattr(tile, name) for name in ("block_m", "block_n", "block_k", "warps", "stages")]
        tuned = gemm.measured_tile(path, gpu, pairs, num_experts) is not None
        yield f"grouped {path} {pairs} pairs {num_experts} experts {rows} rows", show(*numbers, tuned)
    plain = [path for path in GemmPath if not path.wgmma]
    for path, tokens, rows, logits in product(plain, (17, 64, 200, 8192), (128, 2880, 201088), (False, True)):
        tile = gemm.dense_tile(path, gpu, tokens, rows, logits)
        numbers = [tile.block_m, tile.block_n, tile.block_k, tile.warps, tile.stages]
        yield f"gemm {path} {tokens} tokens {rows} rows{' logits' if logits else ''}", show(*numbers)


def _attention(gpu: Gpu) -> Iterator[tuple[str, str]]:
    for case in attention.cases():
        tile = attention.choose(case, gpu)
        numbers = (tile.block_m, tile.block_n, tile.warps, tile.stages, tile.registers, tile.prefetch, tile.early)
        yield f"attention {case.work} {case.head_dim} {case.kv}", show(*numbers)
    for dim in HEAD_DIMS:
        split = attention.split_kv(dim, gpu)
        limits = (split.splits_per_sm, split.least_keys, split.merged_inside, split.fused_sequences)
        yield f"split_kv {dim}", show(*limits)


def _experts(gpu: Gpu) -> Iterator[tuple[str, str]]:
    def line(tile: experts.ExpertTile, warps: int) -> str:
        registers = experts.max_registers(tile, warps, gpu)
        return show(tile.row_tiles, tile.warps_n, tile.slices, tile.ahead, registers)

    for (rows, k, down_rows, down_k, top_k), bits in product(EXPERTS, (4, 8)):
        gate_up = experts.ExpertShape(rows // 16, cdiv(k, 64), bits, NUM_EXPERTS)
        down = experts.ExpertShape(down_rows // 16, cdiv(down_k, 64), bits, NUM_EXPERTS)
        for tokens in (1, 2):
            about = f"{bits} bits {tokens} tokens top {top_k}"
            tile = experts.direct_gate_up(gate_up, tokens, top_k, gpu)
            yield f"gate_up_direct {rows}x{k} {about}", line(tile, tile.warps)
            tile = experts.direct_down(down, tokens, top_k, gpu)
            yield f"down_direct {down_rows}x{down_k} {about}", line(tile, next_power_of_2(top_k) * tile.warps)
        lists = zip(experts.LISTS, (gate_up, down), (f"{rows}x{k}", f"{down_rows}x{down_k}"), strict=True)
        for (which, shape, name), tokens in product(lists, (3, 4, 8, 64)):
            choose = experts.for_list if tokens == 64 else experts.for_own_list
            tile = choose(which, shape, tokens, top_k, gpu)
            yield f"{which} {name} {bits} bits {tokens} tokens top {top_k}", line(tile, tile.warps)
    for tokens in (1, 2):
        yield f"with_mlp {tokens} tokens", _with_mlp(tokens, gpu)


def _with_mlp(tokens: int, gpu: Gpu) -> str:
    """Gemma 4's experts and MLP."""
    if not experts.with_mlp_slices(gpu):
        return "-"
    (first, one), (second, two) = (
        with_mlp._first(2816, 1408, 4224, tokens, 8, {}, gpu),
        with_mlp._second(704, 2816, 2112, tokens, 8, gpu),
    )
    numbers = (first["SLICES"], first["AHEAD"], one["num_warps"], one["maxnreg"])
    return show(*numbers, second["AHEAD"], second["MLP_AHEAD"], two["num_warps"], two["maxnreg"])


def _dense(gpu: Gpu) -> Iterator[tuple[str, str]]:
    for fmt, rows, tokens in product(dense.DenseFormat, (256, 2880, 5120, 8192, 33700, 201088), (1, 8, 9, 24, 40, 100)):
        tile = dense.choose(fmt, rows, tokens, gpu)
        numbers = (tile.columns, tile.row_tiles, tile.warps_n, tile.slices, tile.ahead, tile.registers)
        yield f"dense {fmt} {rows} rows {tokens} tokens", show(*numbers, small_batch.takes(tokens, rows, gpu))


def _thresholds(gpu: Gpu) -> str:
    """What crowds a small batch, pairs that FP8 needs on wgmma, and tokens from which weights are unpacked."""
    least = crowd(gpu)
    unpack = threshold(ThresholdName.UNPACK_TOKENS, gpu)
    if least is None:
        return show(None, None, None, unpack)
    return show(least.pairs, least.tokens, threshold(ThresholdName.FP8_PAIRS, gpu), unpack)


def unmeasured(gpu: Gpu) -> Gpu:
    """The same card in a family of another name: all of the instructions, and nothing measured."""
    return replace(gpu, family=replace(gpu.family, name="sm_of_tomorrow"))


def table() -> dict[str, dict[str, str]]:
    """Case → what is chosen → the cards that choose it."""
    found: dict[str, dict[str, list[str]]] = {}
    for name in REPRESENTATIVES:
        gpu = KNOWN[name]
        for case, value in dict(choices(unmeasured(gpu))).items():
            found.setdefault(case, {}).setdefault(value, []).append(name)
    return {case: {value: " ".join(cards) for value, cards in values.items()} for case, values in found.items()}


def write(file: Path) -> None:
    lines = [f" {json.dumps(case)}: {json.dumps(values)}" for case, values in table().items()]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write(GOLDEN)
