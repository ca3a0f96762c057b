"""The grouped expert kernels and routing on a real GPU: real widths, every tile, graphs, and assembly against its twin.

Without a block-scaled matrix instruction (SM90 for one) ``dot_scaled`` runs in bf16: the MXFP8 kernels are checked
there too, their speed is not to be expected. A card that is only played (``--as``) has no such stand-in.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from microscale.formats import NVFP4
from microscale.hardware import Feature, detect, known, present
from microscale.hardware.tiles.gemm import GemmTile, possible
from microscale.kernels import mxfp8_jit
from microscale.kernels import operands_jit as jit
from microscale.kernels.moe import grouped, routing
from microscale_lab.cases import routing_twins
from microscale_lab.cases.errors import check_rounded
from microscale_lab.cases.experts import GELU, SILU, SWIGLU, ExpertsInput, ExpertsProblem
from microscale_lab.cases.experts import LAYERS as CASES

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.odd_shapes]

REAL = [
    ExpertsInput("gpt-oss", 200, num_experts=8, top_k=4, hidden=2880, intermediate=2880),
    ExpertsInput(
        "gpt-oss, all on the same experts", 300, num_experts=8, top_k=4, hidden=2880, intermediate=2880, spread="one"
    ),
    ExpertsInput("Gemma", 100, num_experts=16, top_k=8, hidden=2816, intermediate=704, gate=GELU, bias=False),
    ExpertsInput("Qwen3-MoE", 100, num_experts=16, top_k=8, hidden=2048, intermediate=768, gate=SILU, bias=False),
    ExpertsInput("2112 wide", 70, num_experts=4, hidden=2816, intermediate=2112, gate=SWIGLU),
    ExpertsInput("odd groups", 70, num_experts=4, hidden=2912, intermediate=96),
]
PATHS = [(fmt, scaled) for fmt in ("mxfp4", "mxfp8") for scaled in (False, True)]


def check(problem: ExpertsProblem, scaled: bool, tile: GemmTile | None = None) -> torch.Tensor:
    gpu = detect()
    if scaled and not gpu.has(Feature.MMA_FP8):
        pytest.skip("no fp8 on this GPU")
    if scaled and not gpu.has(Feature.MX_MMA) and gpu.sm != present().sm:
        pytest.skip(f"{gpu.name} never starts kernels with block-scaled products")
    y = grouped.run(
        problem.packed, problem.layer.gate, problem.x, problem.routing, detect(), block_scaled=scaled, tile=tile
    )
    if scaled:
        check_rounded(y, problem.expected_quantised(), "bf16", 2)
        check_rounded(y, problem.expected(), "e4m3", 3)
    else:
        check_rounded(y, problem.expected(), "bf16", 3)
    return y


@pytest.mark.parametrize("fmt, scaled", PATHS)
@pytest.mark.parametrize("case", CASES + REAL, ids=lambda case: case.name)
def test_cases(case: ExpertsInput, fmt: str, scaled: bool) -> None:
    check(ExpertsProblem.of(case, fmt, "cuda"), scaled)


@pytest.mark.parametrize("fmt, scaled", PATHS)
def test_every_tile(fmt: str, scaled: bool) -> None:
    case = ExpertsInput("tiles", 333, num_experts=5, top_k=3, hidden=416, intermediate=352)
    problem = ExpertsProblem.of(case, fmt, "cuda")
    path = grouped.gemm_path(problem.packed.gate_up.format.bits, scaled, problem.packed.gate_up.format is NVFP4)
    for tile in possible(path, detect()):
        check(problem, scaled, tile=tile)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("case", [REAL[0], REAL[2], REAL[4]], ids=lambda case: case.name)
def test_code_for_mma_sync_on_this_card(case: ExpertsInput, fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's ``arch`` chooses the matrix instruction; the machine code is still for this card."""
    options = grouped.gemm_options
    monkeypatch.setattr(grouped, "gemm_options", lambda *args: options(*args) | {"arch": "sm80"})
    problem = ExpertsProblem.of(case, fmt, "cuda")
    ampere = known("a100")
    if detect().shared_per_block < ampere.shared_per_block:
        pytest.skip(f"{detect().name} has less shared memory than the tiles of {ampere.name} take; see --as a100")
    for tile in possible(grouped.gemm_path(problem.packed.gate_up.format.bits, False, False), ampere):
        y = grouped.run(problem.packed, case.gate, problem.x, problem.routing, ampere, tile=tile)
        check_rounded(y, problem.expected(), "bf16", 3)


def test_the_same_bits_in_every_run() -> None:
    problem = ExpertsProblem.of(REAL[0], "mxfp4", "cuda")
    first = check(problem, scaled=False)
    for _ in range(3):
        assert torch.equal(check(problem, scaled=False), first)


def test_a_graph_follows_its_inputs() -> None:
    """Routing, sort and both GEMMs are captured once and replayed for other tokens."""
    problem = ExpertsProblem.of(
        ExpertsInput("graph", 40, num_experts=8, top_k=4, hidden=256, intermediate=256), "mxfp4", "cuda"
    )
    x, logits = problem.x.contiguous(), torch.randn(40, 8, device="cuda")

    def run() -> torch.Tensor:
        return grouped.run(problem.packed, SWIGLU, x, routing.route(logits, 4), detect())

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        logits.copy_(torch.randn_like(logits))
        graph.replay()
        assert torch.equal(y, run())


@pytest.mark.parametrize("tokens, num_experts, top_k", [(8192, 128, 4), (8192, 32, 4), (3000, 128, 8), (1000, 512, 16)])
def test_routing_of_many_tokens(tokens: int, num_experts: int, top_k: int) -> None:
    logits = torch.randn(tokens, num_experts, device="cuda").bfloat16()  # bf16 logits tie often
    chosen = routing.route(logits, top_k)
    want = routing_twins.reference_route(logits, top_k, routing_twins.RouterKind.TOPK_SOFTMAX)
    assert torch.equal(chosen.expert_ids, want.expert_ids)
    torch.testing.assert_close(chosen.weights, want.weights, rtol=1e-5, atol=0)
    twin = routing_twins.reference_dispatch(chosen.expert_ids, num_experts, 64)
    found = routing.dispatch(chosen.expert_ids, num_experts, 64)
    assert torch.equal(found.offsets, twin.offsets)
    assert torch.equal(found.order, twin.order)
    assert torch.equal(found.tiles, twin.tiles)


# ---- assembly against its plain twin --------------------------------------------------------------------------------


@triton.jit  # type: ignore[untyped-decorator]
def pairs_kernel(words_ptr, factors_ptr, out_ptr, PLAIN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at).to(tl.uint32, bitcast=True)
    factors = tl.load(factors_ptr + at).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + at[:, None] * 2 + tl.arange(0, 2)[None, :], jit.scaled_pairs(words, factors, PLAIN))


@triton.jit  # type: ignore[untyped-decorator]
def bytes_kernel(words_ptr, out_ptr, PLAIN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + at).to(tl.uint32, bitcast=True)
    tl.store(out_ptr + at[:, None] * 4 + tl.arange(0, 4)[None, :], jit.word_bytes(words, PLAIN))


@triton.jit  # type: ignore[untyped-decorator]
def round_kernel(x_ptr, codes_ptr, PLAIN: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes_ptr + at, mxfp8_jit.round_e4m3(tl.load(x_ptr + at), PLAIN))


def test_scaled_pairs_for_every_weight_and_scale() -> None:
    """All 256 halves that an E4M3 weight can become, E2M1's among them, under all scale factors."""
    code = torch.arange(256, dtype=torch.int32, device="cuda")
    half = (code & 0x80) << 8 | (code & 0x7F) << 4
    words = (half | half.flip(0) << 16)[:, None].expand(256, 256).contiguous()
    factor = torch.arange(256, dtype=torch.int32, device="cuda").clamp(56, 254) << 7
    factors = (factor | factor << 16)[None].expand(256, 256).contiguous()
    out = [torch.empty(256 * 256 * 2, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for plain in (False, True):
        pairs_kernel[(64,)](words, factors, out[plain], PLAIN=plain, BLOCK=1024)
    assert torch.equal(out[0].view(torch.int16), out[1].view(torch.int16))


def test_word_bytes() -> None:
    words = torch.randint(-(2**31), 2**31, (1024,), device="cuda").int()
    out = torch.empty(4096, dtype=torch.uint8, device="cuda")
    for plain in (False, True):
        out.zero_()
        bytes_kernel[(1,)](words, out, PLAIN=plain, BLOCK=1024)
        assert torch.equal(out, words.view(torch.uint8))


def test_round_e4m3_for_every_bf16() -> None:
    if not detect().has(Feature.MMA_FP8):
        pytest.skip("no fp8 on this GPU")
    x = torch.arange(65536, device="cuda", dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.where(x.isfinite(), x, 0.0)
    out = [torch.empty(65536, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for plain in (False, True):
        round_kernel[(64,)](x, out[plain], PLAIN=plain, BLOCK=1024)
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
