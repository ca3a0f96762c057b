"""What ``microscale tune`` runs of the small-batch expert GEMMs: layers of gpt-oss-120b and Gemma 4, weights rotating
so that none are read from L2. One GEMM's tile is on trial, the other runs as it would. Tiles of gate and up depend on
how many row tiles there are for an SM, so other layers fill the card less or more than these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Generator

from microscale.formats import block_format
from microscale.hardware import Gpu
from microscale.hardware.tiles import experts
from microscale.hardware.tiles.experts import ANY_LOAD, LISTS, ExpertCase, ExpertGemm
from microscale.hardware.tiles.tuned import TunedTile
from microscale.kernels.moe import small_batch
from microscale.kernels.moe.packed import pack_experts
from microscale.kernels.moe.spec import Activations, MoeSpec
from microscale_lab.kernel_bench import moe
from microscale_lab.kernel_bench.layers import layer_spec
from microscale_lab.tune import candidates
from microscale_lab.tune.job import TileSearch, TuningProblem

if TYPE_CHECKING:
    from torch import Tensor

MODELS = ("gpt-oss-120b", "gemma-4-26b-a4b")
NUM_LAYERS = 3
OWN_LIST, LIST = small_batch.OWN_LIST_TOKENS, small_batch.MAX_TOKENS
"""Tokens where programs find their tiles, and where a list names them."""
FEW = (("gpt-oss-20b", 3), ("gpt-oss-120b", 3), ("gpt-oss-20b", 4), ("gpt-oss-120b", 4))
"""One to three waves, so that how full they are decides what registers are best. By how many experts they choose."""
DIRECT = (ExpertGemm.GATE_UP_DIRECT, ExpertGemm.DOWN_DIRECT)
HALF = "half of gpt-oss-120b"
"""As on one of two cards that share it."""
MORE = {4: "gpt-oss-120b with 8 experts a token", 8: "gpt-oss-120b in mxfp8 with 8 experts a token"}
"""Weight bits → a layer of more than one wave, whose row serves every larger load."""
QWEN36, QWEN3, GEMMA4 = "qwen3.6-35b-a3b-nvfp4", "qwen3-30b-a3b-nvfp4", "gemma-4-26b-a4b-nvfp4"
NARROW = (
    *(
        (name, ExpertGemm.GATE_UP_DIRECT, tokens)
        for name, tokens in ((QWEN36, 1), (GEMMA4, 1), (QWEN3, 1), (GEMMA4, 2))
    ),
    *((QWEN36, ExpertGemm.GATE_UP_LIST, tokens) for tokens in (4, OWN_LIST)),
)
"""Narrow experts in four bits, of which a token has eight or more: rows of their own, by their load."""
NARROW_TOP_K = 8


def layer_of(name: str) -> moe.ExpertLayer:
    big = moe.LAYERS["gpt-oss-120b"]
    if name == HALF:
        return replace(big, intermediate=big.intermediate // 2)
    if name in MORE.values():
        return replace(big, num_experts=32, top_k=8, weight_format="mxfp4" if name == MORE[4] else "mxfp8")
    if name in moe.LAYERS:
        return moe.LAYERS[name]
    spec = layer_spec(name, "experts", MoeSpec)
    sizes = (spec.num_experts, spec.top_k, spec.hidden, spec.intermediate)
    return moe.ExpertLayer(*sizes, spec.weight_format, spec.gate, spec.bias)


@dataclass(frozen=True)
class ExpertGemmWork:
    """One GEMM of one layer at one batch size."""

    model: str
    gemm: ExpertGemm
    tokens: int

    @property
    def is_own_list(self) -> bool:
        return self.tokens <= OWN_LIST

    @property
    def about(self) -> str:
        return f"{self.gemm}, an expert layer of {self.model}, {self.tokens} tokens"


def jobs(gpu: Gpu, quick: bool) -> Iterator[TileSearch]:
    for model in ("gpt-oss-20b",) if quick else MODELS:
        for tokens in (1,) if quick else (1, 2):
            yield from (job_of(ExpertGemmWork(model, gemm, tokens), gpu) for gemm in DIRECT)
    if quick:
        yield job_of(ExpertGemmWork("gpt-oss-20b", LISTS[0], OWN_LIST), gpu)
    else:
        for gemm in LISTS:
            lists = (*((model, tokens) for model in MODELS for tokens in (OWN_LIST, LIST)), *FEW)
            found = [job_of(ExpertGemmWork(model, gemm, tokens), gpu) for model, tokens in lists]
            # A row is measured for the first that it serves.
            yield from {job.key: job for job in reversed(found)}.values()
        for model, tokens in ((HALF, 1), ("qwen3-30b-a3b", 2), (MORE[4], 2), (MORE[8], 2)):
            yield job_of(ExpertGemmWork(model, ExpertGemm.GATE_UP_DIRECT, tokens), gpu)
        yield from (job_of(ExpertGemmWork(*work), gpu) for work in NARROW)


def job_of(work: ExpertGemmWork, gpu: Gpu) -> TileSearch:
    layer = layer_of(work.model)
    bits = block_format(layer.weight_format).bits
    of_down = work.gemm in (ExpertGemm.DOWN_DIRECT, ExpertGemm.DOWN_LIST)
    rows, k = (layer.hidden, layer.intermediate) if of_down else (2 * layer.intermediate, layer.hidden)
    shape = experts.ExpertShape(rows // 16, -(-k // 64), bits, layer.num_experts)
    sizes = (shape, work.tokens, layer.top_k, gpu)
    load: float = work.tokens * layer.top_k * shape.row_tiles
    if work.gemm in LISTS:
        load = shape.chosen_row_tiles(work.tokens, layer.top_k)
        in_use = (experts.for_own_list if work.is_own_list else experts.for_list)(work.gemm, *sizes)
    else:
        in_use = experts.direct_down(*sizes) if of_down else experts.direct_gate_up(*sizes)
    tiles = candidates.of_experts(work.gemm, shape, gpu, in_use)
    return TileSearch(
        experts.SECTION, key_of(work, bits, layer.top_k, load, gpu), work.about, tiles, _prepared(work, gpu)
    )


def key_of(work: ExpertGemmWork, bits: int, top_k: int, load: float, gpu: Gpu) -> ExpertCase:
    """Of the row that serves the case today, or of a new one. Rows of gate and up differ by the load alone: how many
    row tiles there are for an SM decides what registers leave one wave. Those of down differ by tokens."""
    serving, _ = experts.find(work.gemm, bits, work.tokens, top_k, load, gpu)
    if (work.model, work.gemm, work.tokens) in NARROW:
        tokens = OWN_LIST if work.gemm in LISTS else small_batch.DIRECT_TOKENS
        own = ExpertCase(work.gemm, bits, tokens, NARROW_TOP_K, round(load / gpu.num_sms + 0.01, 2))
        return serving if serving is not None and serving.top_k_from == NARROW_TOP_K else own
    if work.gemm in LISTS:
        up_to = ANY_LOAD if work.tokens in (OWN_LIST, LIST) else round(load / gpu.num_sms + 0.01, 2)
        return serving or ExpertCase(work.gemm, bits, OWN_LIST if work.is_own_list else LIST, 1, up_to)
    if work.gemm is ExpertGemm.DOWN_DIRECT:
        return replace(serving or ExpertCase(work.gemm, bits, 0, 1, ANY_LOAD), tokens=work.tokens)
    up_to = ANY_LOAD if work.model in MORE.values() else round(load / gpu.num_sms + 0.01, 2)
    return serving or ExpertCase(work.gemm, bits, small_batch.DIRECT_TOKENS, 1, up_to)


def _prepared(work: ExpertGemmWork, gpu: Gpu) -> Callable[[str], TuningProblem]:
    def prepare(device: str) -> TuningProblem:
        generator = Generator(device).manual_seed(0)
        layer = layer_of(work.model)
        spec = layer.spec(work.tokens)
        checked = moe.random_experts(layer, generator)
        packed = [pack_experts(checked, layer.gate)]
        packed += [pack_experts(moe.random_experts(layer, generator), layer.gate) for _ in range(NUM_LAYERS - 1)]
        x, routing = moe.random_tokens(layer, work.tokens, generator)
        start = small_batch.run_direct
        if work.gemm in LISTS:
            start = small_batch.run_own_list if work.is_own_list else small_batch.run_list

        def run(index: int = 0) -> Tensor:
            return start(packed[index], spec, gpu, x, routing)

        def error() -> float:
            return moe.rms_error(run(), x, routing, checked, layer.gate)

        tolerance = moe.RMS_TOLERANCE[Activations.BF16]
        return TuningProblem(lambda: [run(index) for index in range(NUM_LAYERS)], error, tolerance, NUM_LAYERS)

    return prepare


def order(row: TunedTile[Any, Any]) -> tuple[int, int, int, int, float]:
    """Rows in the order in which they are asked: narrower cases first."""
    key: ExpertCase = row.key
    return list(ExpertGemm).index(key.gemm), key.bits, key.tokens, -key.top_k_from, key.up_to
