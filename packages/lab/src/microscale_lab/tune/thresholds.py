"""What ``microscale tune`` runs for thresholds: two ways of the same layer at sizes around the place where the faster
one changes. Where a threshold holds together with another, the second is measured with the first's figure.

A card without an instruction has no row of the thresholds that are about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Generator, bfloat16, ones, zeros

from microscale.hardware import Feature, Gpu
from microscale.hardware.tiles import dense, thresholds
from microscale.hardware.tiles.gemm import GemmPath
from microscale.hardware.tiles.thresholds import NEVER, Key, ThresholdName, Value
from microscale.hardware.tiles.tuned import Section, TunedTile
from microscale.kernels.dense import gemm, small_batch, unpack
from microscale.kernels.dense.packed import PackedDense
from microscale.kernels.layouts import TILE_ROWS
from microscale.kernels.moe import grouped_wgmma
from microscale.kernels.moe import small_batch as moe_small_batch
from microscale.kernels.moe.cost import bytes_per_expert
from microscale.kernels.moe.packed import PackedExperts, pack_experts
from microscale.kernels.moe.spec import Activations, Parts, Routing
from microscale.kernels.small.fused import TritonSmall
from microscale_lab.kernel_bench import moe
from microscale_lab.kernel_bench.attention import AttentionInput
from microscale_lab.kernel_bench.dense import ROTATED_BYTES
from microscale_lab.kernel_bench.small import EPSILON
from microscale_lab.tune import attention as tune_attention
from microscale_lab.tune import dense as tune_dense
from microscale_lab.tune import grouped as tune_grouped
from microscale_lab.tune.crossing import Border, Crossing, Sides, find_border
from microscale_lab.tune.job import Bench, TuningProblem

if TYPE_CHECKING:
    from torch import Tensor

EXPERTS = "gpt-oss-20b"
CROWD_PAIRS = (2, 4, 6, 8, 10, 12, 16)
CROWD_TOKENS = (8, 16, 24, 32, 40, 48, 56, 64)
FEW_EXPERTS = 8
RESIDENT_PAIRS = (8, 16, 24, 32, 48, 64, 128)
SUM_IN_NORM_TOKENS = (3, 4, 8, 16, 24, 32, 48, 64)
FP8_PAIRS = (4, 8, 12, 16, 20, 24, 32, 48, 64)
UNPACK_SHAPE = (5120, 2880)
UNPACK_TOKENS = (64, 96, 128, 192, 256, 384, 512, 1024)
FEW_ROWS_COLUMNS = 4096
FEW_ROWS_PROGRAMS = (2, 3, 4, 5, 6, 8, 10, 12)
FEW_ROWS_TOKENS = (32, 48, 64, 96, 128, 192)
WIDEN_ROWS = (64, 128, 256, 512, 1024, 2048)
WIDEN_CONTEXT = 4096
FORMATS = ("fp8", "mxfp8", "mxfp4")
"""In fragments; the thresholds are for all of them."""

Found = Mapping[ThresholdName, int]


@dataclass(frozen=True)
class Threshold:
    """One figure: a crossing, and what its border makes of it."""

    name: ThresholdName
    crossing: Callable[[Found], Crossing]
    """With the figures that were found before it."""
    value: Callable[[Border], int]


def jobs(gpu: Gpu, quick: bool) -> Iterator[ThresholdJob]:
    if gpu.has(Feature.WGMMA):
        yield ThresholdJob(gpu, (crowd_pairs(gpu), crowd_tokens(gpu)))
        yield ThresholdJob(gpu, (fp8_pairs(gpu),))
        yield ThresholdJob(gpu, (mxfp8_resident_pairs(gpu),))
    if not quick:  # a launch more or less in a layer
        yield ThresholdJob(gpu, (sum_in_norm_tokens(gpu),))
    yield ThresholdJob(gpu, (unpack_tokens(gpu),))
    yield ThresholdJob(gpu, (few_rows_programs(gpu), few_rows_tokens(gpu)))
    yield ThresholdJob(gpu, (widen_rows(gpu),))


@dataclass(frozen=True)
class ThresholdJob:
    """Thresholds that hold together."""

    gpu: Gpu
    thresholds: tuple[Threshold, ...]
    few: bool = False

    @property
    def section(self) -> Section[Any, Any]:
        return thresholds.SECTION

    @property
    def keys(self) -> tuple[Key, ...]:
        return tuple(Key(each.name) for each in self.thresholds)

    @property
    def steps(self) -> int:
        return sum(len(self._crossing(each, {}).sizes) for each in self.thresholds)

    def quick(self) -> ThresholdJob:
        return replace(self, few=True)

    def rows(self, bench: Bench) -> list[TunedTile[Any, Any]]:
        found: dict[ThresholdName, int] = {}
        rows = []
        for each in self.thresholds:
            border = find_border(self._crossing(each, found), bench)
            found[each.name] = each.value(border)
            rows.append(bench.row(Key(each.name), Value(found[each.name]), border.text, None))
        return rows

    def _crossing(self, threshold: Threshold, found: Found) -> Crossing:
        crossing = threshold.crossing(found)
        return crossing.quick() if self.few else crossing


def up_to(otherwise: int) -> Callable[[Border], int]:
    """The largest size of the way below, or what says that there is none."""
    return lambda border: border.last_below or otherwise


def first_above(border: Border) -> int:
    return border.first_above or NEVER


# ---- experts ---------------------------------------------------------------------------------------------------------


def crowd_pairs(gpu: Gpu) -> Threshold:
    """As many tokens as the small-batch kernels take, over more experts or fewer."""
    tokens = moe_small_batch.MAX_TOKENS

    def prepare(device: str, pairs: int) -> list[Sides]:
        return [crowd_sides(tokens * moe.LAYERS[EXPERTS].top_k // pairs, tokens, gpu, device)]

    crossing = Crossing(f"experts of {EXPERTS}, {tokens} tokens", "pairs an expert", *CROWD, CROWD_PAIRS, prepare)
    return Threshold(ThresholdName.WGMMA_PAIRS, lambda found: crossing, first_above)


def crowd_tokens(gpu: Gpu) -> Threshold:
    """So few experts that even few tokens are enough pairs."""

    def prepare(device: str, tokens: int) -> list[Sides]:
        return [crowd_sides(FEW_EXPERTS, tokens, gpu, device)]

    def crossing(found: Found) -> Crossing:
        least = found.get(ThresholdName.WGMMA_PAIRS, 0)
        enough = [size for size in CROWD_TOKENS if size * moe.LAYERS[EXPERTS].top_k >= least * FEW_EXPERTS]
        about = f"{FEW_EXPERTS} experts of {EXPERTS}'s widths"
        return Crossing(about, "tokens", *CROWD, enough or CROWD_TOKENS[-1:], prepare)

    return Threshold(ThresholdName.WGMMA_TOKENS, crossing, first_above)


CROWD = ("small batch", "wgmma")


def crowd_sides(num_experts: int, tokens: int, gpu: Gpu, device: str) -> Sides:
    layer = replace(moe.LAYERS[EXPERTS], num_experts=num_experts)
    spec = layer.spec(tokens)
    return layer_sides(
        layer, tokens, device,
        lambda each, x, routing: moe_small_batch.run_list(each, spec, gpu, x, routing),
        lambda each, x, routing: grouped_wgmma.run(each, layer.gate, x, routing, gpu, short_list=True),
    )  # fmt: skip


def sum_in_norm_tokens(gpu: Gpu) -> Threshold:
    """The list and the norm behind it, with the sum of a token's experts in the norm or in a launch of its own."""

    def prepare(device: str, tokens: int) -> list[Sides]:
        return [sum_in_norm_sides(tokens, gpu, device)]

    about = f"experts of {EXPERTS} and the norm behind them"
    crossing = Crossing(about, "tokens", "sum in the norm", "sum apart", SUM_IN_NORM_TOKENS, prepare)
    return Threshold(ThresholdName.SUM_IN_NORM_TOKENS, lambda found: crossing, up_to(1))


def sum_in_norm_sides(tokens: int, gpu: Gpu, device: str) -> Sides:
    """Onto a stream of zeros: what the norm adds up is the layer's answer."""
    layer = moe.LAYERS[EXPERTS]
    spec, small = layer.spec(tokens), TritonSmall(gpu)
    stream = zeros((tokens, layer.hidden), dtype=bfloat16, device=device)
    weight = ones(layer.hidden, dtype=bfloat16, device=device)

    def normed(x: Tensor | Parts) -> Tensor:
        return small.add_rms_norm(x, stream, weight, EPSILON)[1]

    return layer_sides(
        layer, tokens, device,
        lambda each, x, routing: normed(moe_small_batch.run_list_parts(each, spec, gpu, x, routing)),
        lambda each, x, routing: normed(moe_small_batch.run_list(each, spec, gpu, x, routing)),
    )  # fmt: skip


Start = Callable[[PackedExperts, "Tensor", Routing], "Tensor"]


def layer_sides(layer: moe.ExpertLayer, tokens: int, device: str, below: Start, above: Start) -> Sides:
    """Two ways of an expert layer, over enough layers that their weights come from memory."""
    generator = Generator(device).manual_seed(0)
    count = max(1, round(ROTATED_BYTES / (layer.num_experts * bytes_per_expert(layer.spec(tokens)))))
    made = [moe.random_experts(layer, generator) for _ in range(count)]
    packed = [pack_experts(each, layer.gate) for each in made]
    x, routing = moe.random_tokens(layer, tokens, generator)

    def problem(start: Start) -> TuningProblem:
        def error() -> float:
            return moe.rms_error(start(packed[0], x, routing), x, routing, made[0], layer.gate)

        tolerance = moe.RMS_TOLERANCE[Activations.BF16]
        return TuningProblem(lambda: [start(each, x, routing) for each in packed], error, tolerance, count)

    return Sides(problem(below), problem(above))


def fp8_pairs(gpu: Gpu) -> Threshold:
    """More tokens than a small batch has, on ``wgmma`` in bf16 and in FP8."""
    shape = tune_grouped.GroupedShape()
    packing = tune_grouped.packing_of(GemmPath.W4A16_WGMMA, shape)

    def prepare(device: str, pairs: int) -> list[Sides]:
        ways = (GemmPath.W4A16_WGMMA, GemmPath.W4A8_WGMMA)
        return [Sides(*(tune_grouped.prepared(path, gpu, packing, pairs)(device) for path in ways))]

    about = f"{shape.num_experts} experts of {shape.hidden} x {shape.intermediate} on wgmma"
    crossing = Crossing(about, "pairs an expert", "bf16", "FP8", FP8_PAIRS, prepare)
    return Threshold(ThresholdName.FP8_PAIRS, lambda found: crossing, up_to(1))


def mxfp8_resident_pairs(gpu: Gpu) -> Threshold:
    """MXFP8 experts in the portable grouped kernel and in the resident one on ``wgmma``."""
    shape = tune_grouped.GroupedShape()
    packing = tune_grouped.packing_of(GemmPath.W8A16, shape)

    def prepare(device: str, pairs: int) -> list[Sides]:
        ways = (GemmPath.W8A16, GemmPath.W8A16_WGMMA)
        return [Sides(*(tune_grouped.prepared(path, gpu, packing, pairs)(device) for path in ways))]

    about = f"{shape.num_experts} MXFP8 experts of {shape.hidden} x {shape.intermediate}"
    crossing = Crossing(about, "pairs an expert", "grouped", "resident on wgmma", RESIDENT_PAIRS, prepare)
    return Threshold(ThresholdName.MXFP8_RESIDENT_PAIRS, lambda found: crossing, first_above)


# ---- dense layers ----------------------------------------------------------------------------------------------------


def unpack_tokens(gpu: Gpu) -> Threshold:
    def prepare(device: str, tokens: int) -> list[Sides]:
        return [dense_sides(fmt, UNPACK_SHAPE, tokens, device) for fmt in FORMATS]

    def dense_sides(fmt: str, shape: tuple[int, int], tokens: int, device: str) -> Sides:
        layers = tune_dense.DenseLayers.of(fmt, *shape, tokens, device)
        # FP8 weights with their scales round to bf16 when they are unpacked.
        unpacked = layers.problem(lambda packed, x: unpack.run(packed, x, None), roundings=2 if fmt == "fp8" else 1)
        return Sides(layers.problem(by_gemm(gpu)), unpacked)

    about = f"{' x '.join(map(str, UNPACK_SHAPE))} in {', '.join(FORMATS)}"
    crossing = Crossing(about, "tokens", "GEMM", "a bf16 copy and cuBLAS", UNPACK_TOKENS, prepare)
    return Threshold(ThresholdName.UNPACK_TOKENS, lambda found: crossing, first_above)


def few_rows_programs(gpu: Gpu) -> Threshold:
    """Enough rows that a batch has ``programs`` programs on each SM."""

    def prepare(device: str, programs: int) -> list[Sides]:
        return few_rows_sides(gpu, programs, (32, 64), device)

    about = f"{FEW_ROWS_COLUMNS} columns in {', '.join(FORMATS)}, 32 and 64 tokens"
    crossing = Crossing(about, "programs an SM", "small batch", "GEMM", FEW_ROWS_PROGRAMS, prepare)
    return Threshold(ThresholdName.FEW_ROWS_PROGRAMS, lambda found: crossing, up_to(1))


def few_rows_tokens(gpu: Gpu) -> Threshold:
    """As many rows as ``FEW_ROWS_PROGRAMS`` allows. Without a border nothing beyond the usual batches is taken."""

    def crossing(found: Found) -> Crossing:
        programs = found.get(ThresholdName.FEW_ROWS_PROGRAMS, 1)

        def prepare(device: str, tokens: int) -> list[Sides]:
            return few_rows_sides(gpu, programs, (tokens,), device)

        about = f"{FEW_ROWS_COLUMNS} columns in {', '.join(FORMATS)}, {programs} programs an SM"
        return Crossing(about, "tokens", "small batch", "GEMM", FEW_ROWS_TOKENS, prepare)

    return Threshold(ThresholdName.FEW_ROWS_TOKENS, crossing, up_to(small_batch.MAX_TOKENS))


def few_rows_sides(gpu: Gpu, programs: int, batches: Sequence[int], device: str) -> list[Sides]:
    found = []
    for tokens in batches:
        blocks = -(-tokens // dense.COLUMNS[-1])
        rows = max(1, programs * gpu.num_sms // blocks) * TILE_ROWS
        for fmt in FORMATS:
            layers = tune_dense.DenseLayers.of(fmt, rows, FEW_ROWS_COLUMNS, tokens, device)
            by_small_batch = layers.problem(lambda packed, x: small_batch.run(packed, gpu, x, None))
            found.append(Sides(by_small_batch, layers.problem(by_gemm(gpu))))
    return found


def by_gemm(gpu: Gpu) -> Callable[[PackedDense, Tensor], Tensor]:
    return lambda packed, x: gemm.run(packed, gpu, x, None)


# ---- attention -------------------------------------------------------------------------------------------------------


def widen_rows(gpu: Gpu) -> Threshold:
    """The end of a prompt, in each head size that a preset has."""

    def prepare(device: str, rows: int) -> list[Sides]:
        found = []
        for layer in dict.fromkeys(tune_attention.LAYER_OF.values()):
            spec = AttentionInput(layer, 1, 1).spec
            new = rows * spec.num_kv_heads // spec.num_heads
            problem = tune_attention.plain(AttentionInput(layer, 1, WIDEN_CONTEXT, new=new, fp8=True), gpu)(device)
            found.append(Sides(*(tune_attention.widened_from(least, problem, gpu) for least in (NEVER, 1))))
        return found

    about = f"new tokens of a prompt at {WIDEN_CONTEXT}, FP8 keys"
    crossing = Crossing(about, "query rows", "as stored", "a bf16 copy", WIDEN_ROWS, prepare)
    return Threshold(ThresholdName.WIDEN_ROWS, lambda found: crossing, first_above)
