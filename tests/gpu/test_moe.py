"""Expert layers on the present GPU against the float32 reference.

Tolerances: float32 sums apart, an answer differs from the reference by its roundings to bf16. The small-batch kernels
round twice (the activations between the GEMMs, the answer), the grouped ones three times (also each expert's part).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from microscale.errors import Unsupported
from microscale.formats import MXFP8, decode, encode
from microscale.hardware import Feature, detect, known
from microscale.hardware.tiles.experts import with_mlp_slices
from microscale.hardware.tiles.gemm import GemmPath, GemmTile
from microscale.kernels.dense.packed import pack
from microscale.kernels.dense.spec import DenseWeights
from microscale.kernels.moe import grouped_wgmma, small_batch
from microscale.kernels.moe.bf16_activations import TritonFp8BlockA16, TritonNvfp4A16, TritonW4A16, TritonW8A16
from microscale.kernels.moe.narrow_activations import TritonW4A8
from microscale.kernels.moe.paths import LIST_PARTS
from microscale.kernels.moe.reference import apply_gate
from microscale.kernels.moe.spec import Activations, Mlp, MlpSpec, MoeSpec, Routing
from microscale.kernels.small.fused import TritonSmall
from microscale.models.gemma4.model import in_runs
from microscale.planning.paths import pick
from microscale_lab.calls import run_moe
from microscale_lab.cases.errors import assert_close, check_rounded
from microscale_lab.cases.experts import GELU, SILU, ExpertsInput, ExpertsProblem, e4m3_by_token
from microscale_lab.cases.experts import LAYERS as CASES
from microscale_lab.cases.moe import fp8_bound, gate_e4m3
from microscale_lab.tune.candidates import of_gemm

pytestmark = pytest.mark.odd_shapes
DEVICE = "cuda"
IMPLEMENTATIONS = {
    "mxfp4": TritonW4A16(),
    "mxfp8": TritonW8A16(),
    "nvfp4": TritonNvfp4A16(),
    "fp8_block": TritonFp8BlockA16(),
}
REAL = [
    *(ExpertsInput(f"gpt-oss, {n} tokens", n, 8, 4, 2880, 2880) for n in (1, 2, 3, 8, 9, 33, 64, 65, 256, 700)),
    *(ExpertsInput(f"Gemma 4, {n} tokens", n, 16, 8, 2816, 704, GELU, bias=False) for n in (1, 2, 5, 64, 200)),
    *(ExpertsInput(f"Qwen3-MoE, {n} tokens", n, 16, 8, 2048, 768, SILU, bias=False) for n in (1, 2, 5, 64, 200)),
    ExpertsInput("2112 wide", 7, 4, 2, 2112, 2112),
    ExpertsInput("all of 64 tokens on the same experts", 64, 8, 2, 704, 704, spread="one"),
    ExpertsInput("all of 300 tokens on one expert", 300, 8, 1, 704, 704, spread="one"),
    ExpertsInput("100 tokens, unused experts", 100, 32, 2, 704, 352, spread="unused"),
    ExpertsInput("90 tokens, K odd in groups", 90, 4, 2, 288, 352),
    ExpertsInput("90 tokens, K too short for wgmma", 90, 4, 2, 96, 160),
    ExpertsInput("300 tokens, K odd in groups, gelu", 300, 4, 3, 352, 96, GELU),
    ExpertsInput("1 expert", 70, 1, 1, 320, 320),
    ExpertsInput("top 16 of 512 experts", 5, 512, 16, 64, 64),
]


def spec_of(case: ExpertsInput, fmt: str) -> MoeSpec:
    sizes = (case.num_experts, case.top_k, case.hidden, case.intermediate)
    return MoeSpec(*sizes, fmt, Activations.BF16, case.gate, case.bias, case.tokens)


def run(problem: ExpertsProblem, fmt: str) -> Tensor:
    return run_moe(
        IMPLEMENTATIONS[fmt], problem.packed, spec_of(problem.layer, fmt), detect(), problem.x, problem.routing
    )


def roundings(tokens: int, fmt: str) -> int:
    """Of FP8 blocks the weights of both matrices are rounded too."""
    if tokens <= small_batch.MAX_TOKENS:
        return 2
    return 5 if fmt == "fp8_block" else 3


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", [*CASES, *REAL], ids=lambda case: case.name)
def test_answers_are_the_reference(case: ExpertsInput, fmt: str) -> None:
    problem = ExpertsProblem.of(case, fmt, DEVICE)
    assert IMPLEMENTATIONS[fmt].supports(spec_of(case, fmt), detect()) is None
    check_rounded(run(problem, fmt), problem.expected(), "bf16", roundings(case.tokens, fmt))


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
@pytest.mark.parametrize("spread", ["even", "one", "unused"])
@pytest.mark.parametrize(("num_experts", "top_k"), [(32, 4), (128, 4), (128, 8), (70, 3)])
def test_programs_that_find_their_tiles(num_experts: int, top_k: int, spread: str, fmt: str) -> None:
    """To the bit as by the list, in every run; and as the oracle runs it on both sides of the border."""
    gpu = detect()
    for tokens in range(1, small_batch.OWN_LIST_TOKENS + 2):
        case = ExpertsInput("own list", tokens, num_experts, top_k, 704, 352, spread=spread)
        problem = ExpertsProblem.of(case, fmt, DEVICE)
        check_rounded(run(problem, fmt), problem.expected(), "bf16", 2)
        if tokens > small_batch.OWN_LIST_TOKENS:
            continue
        given = problem.packed, spec_of(case, fmt), gpu, problem.x, problem.routing
        listed = small_batch.run_list(*given)
        assert all(torch.equal(small_batch.run_own_list(*given), listed) for _ in range(3))


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
def test_as_many_tiles_as_there_may_be(fmt: str) -> None:
    """Eight tokens of which no two choose the same expert, and eight that all choose the same."""
    case = ExpertsInput("own list", 8, 128, 8, 704, 352)
    problem = ExpertsProblem.of(case, fmt, DEVICE)
    apart = torch.randperm(128, device=DEVICE)[:64].int().view(8, 8)
    for ids in (apart, apart[:1].expand(8, 8).contiguous()):
        routed = replace(problem, routing=Routing(ids, problem.routing.weights))
        check_rounded(run(routed, fmt), routed.expected(), "bf16", 2)
        given = routed.packed, spec_of(case, fmt), detect(), routed.x, routed.routing
        assert torch.equal(run(routed, fmt), small_batch.run_list(*given))


def check_fp8(actual: Tensor, problem: ExpertsProblem) -> None:
    """Near the layer with the same 8-bit numbers."""
    bound = fp8_bound(problem.layer)
    same = problem.expected_quantised(e4m3_by_token, gate_e4m3)
    assert_close(actual, same, worst=bound.worst, rms=bound.rms)
    check_rounded(actual, problem.expected(), "e4m3", 3)


TILES = {
    f"{path} {tile.block_n} x {tile.block_m} x {tile.stages}": (path, tile)
    for path in GemmPath
    if path.wgmma
    for tile in of_gemm(path, known("h200"))
    if tile.stages in (4, 5, 8)
}
RESIDENT = {name: (path, tile) for name, (path, tile) in TILES.items() if tile.resident(path)}


@pytest.mark.parametrize("path, tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("tokens", [1, 2, 40, 300, 700])
def test_every_wgmma_tile(path: GemmPath, tile: GemmTile, tokens: int) -> None:
    gpu = detect()
    if not gpu.has(Feature.WGMMA):
        pytest.skip("needs wgmma")
    fp8 = path is GemmPath.W4A8_WGMMA
    problem = ExpertsProblem.of(ExpertsInput("tile", tokens, 5, 2, 352, 704), f"mxfp{path.weight_bits}", DEVICE)
    few = tokens * 2 <= small_batch.LIST_PAIRS and not fp8 and not tile.resident(path)
    for short_list in {False, few}:
        check_tile(problem, tile, fp8, short_list)


@pytest.mark.parametrize("path, tile", RESIDENT.values(), ids=RESIDENT)
@pytest.mark.parametrize("tokens", [40, 700])
def test_resident_programs_go_through_many_items(path: GemmPath, tile: GemmTile, tokens: int) -> None:
    """On few SMs the ring of K tiles goes on from item to item, past experts without a token, and comes round many
    times; the answer is that of programs with one item each, to the bit, in every run."""
    gpu = detect()
    if not gpu.has(Feature.WGMMA):
        pytest.skip("needs wgmma")
    fp8 = path is GemmPath.W4A8_WGMMA
    problem = ExpertsProblem.of(
        ExpertsInput("items", tokens, 32, 2, 352, 704, spread="unused"), f"mxfp{path.weight_bits}", DEVICE
    )
    given = problem.packed, problem.layer.gate, problem.x, problem.routing
    wanted = grouped_wgmma.run(*given, gpu, tile, fp8=fp8)
    if fp8:
        check_fp8(wanted, problem)
    else:
        check_rounded(wanted, problem.expected(), "bf16", 3)
    for num_sms in (1, 3, 3, 3, gpu.num_sms):
        few = replace(gpu, num_sms=num_sms)
        assert torch.equal(grouped_wgmma.run(*given, few, tile, fp8=fp8), wanted)


def check_tile(problem: ExpertsProblem, tile: GemmTile, fp8: bool, short_list: bool) -> None:
    actual = grouped_wgmma.run(
        problem.packed, problem.layer.gate, problem.x, problem.routing, detect(), tile, fp8=fp8, short_list=short_list
    )
    if fp8:
        check_fp8(actual, problem)
    else:
        check_rounded(actual, problem.expected(), "bf16", 3)


@pytest.mark.parametrize("case", [case for case in REAL if case.tokens > small_batch.MAX_TOKENS], ids=lambda c: c.name)
def test_8_bit_activations(case: ExpertsInput) -> None:
    gpu, implementation = detect(), TritonW4A8()
    spec = replace(spec_of(case, "mxfp4"), activations=Activations.MXFP8)
    if not gpu.has(Feature.WGMMA) or implementation.supports(spec, gpu) is not None:
        pytest.skip("runs elsewhere, or with bf16 activations")
    problem = ExpertsProblem.of(case, "mxfp4", DEVICE)
    check_fp8(grouped_wgmma.run(problem.packed, case.gate, problem.x, problem.routing, gpu, fp8=True), problem)
    actual = run_moe(implementation, problem.packed, spec, gpu, problem.x, problem.routing)
    check_rounded(actual, problem.expected(), "e4m3", 3)


def test_8_bit_activations_keep_nan_in_its_token() -> None:
    if not detect().has(Feature.WGMMA):
        pytest.skip("needs wgmma")
    problem = ExpertsProblem.of(ExpertsInput("poison", 200, 4, 2, 320, 288), "mxfp4", DEVICE)
    x = problem.x.clone()
    x[0, 17] = float("nan")
    y = grouped_wgmma.run(problem.packed, problem.layer.gate, x, problem.routing, detect(), fp8=True)
    assert y[0].isnan().all()
    assert not y[1:].isnan().any()


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 5, 16, 128])
@pytest.mark.parametrize("magnitude", [2.0**-30, 2.0**20])
def test_the_range_of_bf16_survives(tokens: int, magnitude: float, fmt: str) -> None:
    """f16 would lose 2**-30 and overflow at 2**20; between the GEMMs this gate squares that."""
    case = ExpertsInput("range", tokens, 4, 2, 320, 288, GELU, bias=False)
    problem = ExpertsProblem.of(case, fmt, DEVICE)
    problem = replace(problem, x=(problem.x.float() * magnitude).bfloat16())
    check_rounded(run(problem, fmt), problem.expected(), "bf16", roundings(tokens, fmt))


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 2, 5, 20, 200])
def test_nan_in_one_token_stays_in_it(tokens: int, fmt: str) -> None:
    case = ExpertsInput("poison", tokens, 4, 2, 320, 288)
    problem = ExpertsProblem.of(case, fmt, DEVICE)
    x = problem.x.clone()
    x[0, 17] = float("nan")
    y = run(replace(problem, x=x), fmt)
    assert y[0].isnan().all()
    assert not y[1:].isnan().any()


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 7, 64, 333])
def test_results_are_the_same_in_every_run(tokens: int, fmt: str) -> None:
    problem = ExpertsProblem.of(ExpertsInput("again", tokens, 8, 4, 704, 352), fmt, DEVICE)
    first = run(problem, fmt)
    assert all(torch.equal(run(problem, fmt), first) for _ in range(5))


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
@pytest.mark.parametrize("tokens", [1, 4, 16, 200])
def test_a_graph_follows_new_tokens_and_new_routing(tokens: int, fmt: str) -> None:
    case = ExpertsInput("graph", tokens, 8, 2, 320, 352)
    problem = ExpertsProblem.of(case, fmt, DEVICE)
    x = problem.x.clone()
    routing = Routing(problem.routing.expert_ids.clone(), problem.routing.weights.clone())
    captured = replace(problem, x=x, routing=routing)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(captured, fmt)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(captured, fmt)
    for shift in range(3):
        x.copy_(problem.x.roll(shift, dims=1))
        routing.expert_ids.copy_((problem.routing.expert_ids + shift) % case.num_experts)
        graph.replay()
        check_rounded(y, captured.expected(), "bf16", roundings(tokens, fmt))


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
def test_no_tokens_give_no_answer(fmt: str) -> None:
    problem = ExpertsProblem.of(ExpertsInput("empty", 0, 4, 2, 96, 96), fmt, DEVICE)
    assert run(problem, fmt).shape == (0, 96)


def test_other_types_are_refused() -> None:
    problem = ExpertsProblem.of(ExpertsInput("float", 3), "mxfp4", DEVICE)
    with pytest.raises(Unsupported, match=r"reads rows of bfloat16, not torch\.float32"):
        run(replace(problem, x=problem.x.float()), "mxfp4")


@pytest.mark.parametrize("fmt", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "case", [case for case in [*CASES, *REAL] if 2 < case.tokens <= 64], ids=lambda case: case.name
)
def test_a_sum_that_is_left_to_the_norm_is_the_same_bits(case: ExpertsInput, fmt: str) -> None:
    """The layer and the norm behind it, with the sum of a token's experts in the one or in the other."""
    problem, spec, entry = ExpertsProblem.of(case, fmt, DEVICE), spec_of(case, fmt), IMPLEMENTATIONS[fmt]
    small = TritonSmall(detect())
    generator = torch.Generator(DEVICE).manual_seed(case.tokens)
    stream, weight = (
        torch.randn(size, generator=generator, device=DEVICE).bfloat16()
        for size in ((case.tokens, case.hidden), (case.hidden,))
    )
    y = small_batch.run_list(problem.packed, spec, detect(), problem.x, problem.routing)
    parts = entry.run_parts(problem.packed, spec, detect(), problem.x, problem.routing, LIST_PARTS)
    assert torch.equal(parts.summed(torch.bfloat16), y)
    wanted, found = (small.add_rms_norm(each, stream, weight, 1e-5) for each in (y, parts))
    assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))
    check_rounded(found[1], problem.expected() + stream.float(), "bf16", 3)


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("hidden", "intermediate", "mlp", "top_k"), [(2816, 704, 2112, 8), (352, 96, 160, 3)])
def test_a_dense_mlp_in_the_experts_launches(hidden: int, intermediate: int, mlp: int, top_k: int, tokens: int) -> None:
    problem = ExpertsProblem.of(
        ExpertsInput("", tokens, 16, top_k, hidden, intermediate, GELU, bias=False), "mxfp8", DEVICE
    )
    generator = torch.Generator(DEVICE).manual_seed(1)
    full_gate_up, full_down, mlp_x = (
        torch.randn(size, generator=generator, device=DEVICE) / scale
        for size, scale in (((2 * mlp, hidden), hidden**0.5), ((hidden, mlp), mlp**0.5), ((tokens, hidden), 1.0))
    )
    gate_up, down, x = encode(full_gate_up, MXFP8), encode(full_down, MXFP8), mlp_x.bfloat16()
    parts = Mlp(pack(DenseWeights(in_runs(gate_up))), pack(DenseWeights(down)))
    spec = replace(spec_of(problem.layer, "mxfp8"), mlp=MlpSpec(mlp, "mxfp8", packed=True, bias=False))
    both = torch.stack((x, problem.x))
    picked = pick(TritonW8A16().mlp_paths, spec, detect())
    assert (picked.path is not None) == bool(with_mlp_slices(detect()))
    if picked.path is None:
        pytest.skip("runs beside the experts on this GPU")
    ours = TritonW8A16().run_with_mlp(problem.packed, parts, spec, detect(), both, problem.routing, picked.path)
    truth = apply_gate(x.float() @ decode(gate_up).T, GELU) @ decode(down).T
    check_rounded(ours[0], truth, "bf16", 2)
    check_rounded(ours[1], problem.expected(), "bf16", 2)
