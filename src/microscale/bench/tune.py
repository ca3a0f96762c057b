"""``microscale tune``: measures the tiles of the grouped expert GEMMs on the present GPU and writes its family's file.

For each path that the card can run and each share of pairs per expert, every tile that fits runs one expert layer with
gpt-oss's widths; the fastest whose answer is right is kept. Weights are random codes, so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from microscale.errors import MicroscaleError, Unsupported
from microscale.formats import BLOCK, BlockScaled, block_format
from microscale.hardware import Feature, Gpu, tiles
from microscale.hardware.tiles import BUSY_PAIRS, GemmPath, Tile, TunedFile, TunedRow
from microscale.kernels.moe import grouped, grouped_wgmma, reference
from microscale.kernels.moe.packed import PackedExperts, pack_experts
from microscale.kernels.moe.spec import Gate, GateKind, MoeWeights, Routing

SHARES = (8, 16, 32, 64, 128, 256, 1024)
"""Pairs per expert that are measured; a tile serves up to the geometric mean of its share and the next."""
TOP_K = 4
GATE = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
MAX_ERROR = {2: 1e-2, 1: 8e-2}
"""Relative RMS error against float32 above which a tile is wrong: three roundings to bf16, two to E4M3 (by bytes)."""


@dataclass(frozen=True)
class Shape:
    """The layer that is timed: gpt-oss-120b's, 1.7 GB in MXFP4. With 16 experts, which fill the SMs unevenly, narrower
    tiles win than on the real layer."""

    num_experts: int = 128
    hidden: int = 2880
    intermediate: int = 2880


@dataclass(frozen=True)
class Layer:
    weights: MoeWeights
    packed: PackedExperts
    x: Tensor
    routing: Routing


def tune(
    gpu: Gpu,
    directory: Path | None = None,
    *,
    paths: Sequence[GemmPath] | None = None,
    shares: Sequence[int] = SHARES,
    shape: Shape | None = None,
    console: Console | None = None,
    time_us: Callable[[Callable[[], object]], float] | None = None,
) -> Path:
    """Measure on the present GPU, write ``<family>.json`` into ``directory`` and return its path.

    The default directory is the one that ``choose`` reads. Paths that are not measured keep their earlier rows.
    """
    if gpu.is_cpu:
        raise Unsupported("Tuning needs a GPU; this machine has none that PyTorch can use.")
    shape = shape or Shape()
    wanted = list(paths or runnable(gpu))
    found: dict[GemmPath, tuple[TunedRow, ...]] = {}
    with _progress(console) as progress:
        for path in wanted:
            candidates = list(tiles.candidates(path, gpu))
            task = progress.add_task(path.value, total=len(shares) * len(candidates))
            rows = []
            experts = make_experts(shape, path)
            packed = pack_experts(experts, GATE)
            for share in shares:
                layer = make_layer(experts, packed, share)
                timed = []
                for tile in candidates:
                    timed.append((_measure(layer, path, gpu, tile, time_us or graph_us), tile))
                    progress.advance(task)
                best = min(timed, key=lambda item: item[0])
                if best[0] == float("inf"):
                    raise MicroscaleError(f"No tile of {path} gave a right answer on {gpu.name}.")
                rows.append((share, *best))
            found[path] = _merge(rows)
    return _write(gpu, directory or tiles.TUNED_DIR, found)


def runnable(gpu: Gpu) -> list[GemmPath]:
    """The paths that the expert layers take on this card. With wgmma MXFP4 has kernels of its own."""
    if gpu.has(Feature.WGMMA):
        return [GemmPath.W4A16_WGMMA, GemmPath.W4A8_WGMMA, GemmPath.W8A16]
    scaled = gpu.has(Feature.MX_MMA) or gpu.has(Feature.TCGEN05)
    return [path for path in GemmPath if not path.wgmma and (scaled or not path.block_scaled)]


def make_experts(shape: Shape, path: GemmPath, device: str = "cuda") -> MoeWeights:
    """Random experts."""
    generator = torch.Generator(device).manual_seed(0)

    def random_bytes(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, dtype=torch.uint8, generator=generator, device=device)

    def weights(rows: int, columns: int) -> BlockScaled:
        fmt = block_format("mxfp4" if path.weight_bits == 4 else "mxfp8")
        size = (shape.num_experts, rows)
        codes = random_bytes(0, 256, *size, columns * fmt.bits // 8)
        if fmt.bits == 8:
            codes = torch.where(codes % 128 == 127, 0, codes)  # E4M3's NaN
        # Scales that bring the sum of a row of squares near 1: codes have an RMS of about 3 and 130.
        middle = 127 - (7 if fmt.bits == 4 else 13)
        return BlockScaled(codes, random_bytes(middle - 1, middle + 2, *size, columns // BLOCK), fmt)

    def bias(rows: int) -> Tensor:
        return torch.randn(shape.num_experts, rows, generator=generator, device=device).bfloat16()

    gate_up, down = weights(2 * shape.intermediate, shape.hidden), weights(shape.hidden, shape.intermediate)
    return MoeWeights(gate_up, down, bias(2 * shape.intermediate), bias(shape.hidden))


def make_layer(experts: MoeWeights, packed: PackedExperts, share: int) -> Layer:
    """Tokens of which about ``share`` go to each expert, spread as a router spreads them."""
    num_experts, hidden, _ = experts.down.shape
    device = experts.down.device
    generator = torch.Generator(device).manual_seed(share)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    tokens = max(1, share * num_experts // TOP_K)
    values, ids = normal(tokens, num_experts).topk(TOP_K, dim=-1)
    routing = Routing(ids.int().contiguous(), values.softmax(dim=-1).contiguous())
    return Layer(experts, packed, normal(tokens, hidden).bfloat16(), routing)


def _measure(
    layer: Layer, path: GemmPath, gpu: Gpu, tile: Tile, time_us: Callable[[Callable[[], object]], float]
) -> float:
    """Microseconds of one layer, or infinity where the answer is wrong or the kernel cannot be launched."""

    def run() -> Tensor:
        if path.wgmma:
            fp8 = path is GemmPath.W4A8_WGMMA
            return grouped_wgmma.run(layer.packed, GATE, layer.x, layer.routing, gpu, tile, fp8=fp8)
        return grouped.run(layer.packed, GATE, layer.x, layer.routing, gpu, block_scaled=path.block_scaled, tile=tile)

    try:
        actual = run()[:16].float()
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    few = Routing(layer.routing.expert_ids[:16], layer.routing.weights[:16])
    expected = reference.moe(layer.x[:16], layer.weights, few, GATE)
    error = float((actual - expected).norm() / expected.norm())
    return time_us(run) if error <= MAX_ERROR[path.activation_bytes] else float("inf")


def graph_us(run: Callable[[], object], repeats: int = 15) -> float:
    """The median time of one call in microseconds, from replays of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(sorted(times[2:])[repeats // 2])


def _merge(rows: list[tuple[int, float, Tile]]) -> tuple[TunedRow, ...]:
    """Rows whose ``up_to`` lies between their share and the next; neighbours with the same tile become one."""
    merged: list[TunedRow] = []
    for index, (share, microseconds, tile) in enumerate(rows):
        last = index + 1 == len(rows)
        up_to = BUSY_PAIRS if last else round((share * rows[index + 1][0]) ** 0.5)
        if merged and merged[-1].tile == tile:
            merged.pop()
        merged.append(TunedRow(up_to, tile, round(microseconds, 1)))
    return tuple(merged)


def _write(gpu: Gpu, directory: Path, found: dict[GemmPath, tuple[TunedRow, ...]]) -> Path:
    file = directory / f"{gpu.family.name}.json"
    earlier = dict(tiles.read(file, gpu.family).paths) if file.exists() else {}
    today = datetime.now(UTC).date().isoformat()
    versions = (str(torch.__version__), str(triton.__version__))
    tuned = TunedFile(gpu.family.name, gpu.name, *versions, today, earlier | found)
    directory.mkdir(parents=True, exist_ok=True)
    file.write_text(tuned.to_json())
    tiles.tuned.cache_clear()
    return file


def _progress(console: Console | None) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)
