"""Kernels as they are compiled for cards that are not here, executed on a CPU against the float32 references; and
faults that are put into their PTX, which the checks or the numbers must show."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import cases_attention, cases_dense
from microscale.formats import block_format
from microscale.formats.mxfp8 import round_e4m3
from microscale.hardware import Feature, Gpu, known
from microscale.hardware.tiles.gemm import GemmPath, possible
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.reference import attention
from microscale.kernels.attention.spec import PagedKv
from microscale.kernels.dense import gemm
from microscale.kernels.dense.packed import pack
from microscale.kernels.moe import grouped, small_batch
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.spec import MoeSpec, Routing
from microscale.kernels.narrow import nvfp4
from microscale.kernels.op import Activations
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.spec import RopeTable
from microscale_lab.calls import run_attention, run_fused
from microscale_lab.cases.errors import assert_close, check_rounded, errors, rms_step, step
from microscale_lab.cases.experts import GELU, ExpertsInput, ExpertsProblem
from microscale_lab.cases.moe import SAME_NVFP4
from ptxproof import TritonKernel
from ptxproof.ptx import PtxInstruction, instructions
from support.interpreted import Edit, interpreted

pytestmark = pytest.mark.timeout(600)
HIDDEN, INTERMEDIATE = 352, 160
"""Widths with tails: no multiple of a tile of K."""
MoeRun = Callable[[PackedExperts, MoeSpec, Gpu, Tensor, Routing], Tensor]


@cache
def problem(tokens: int, fmt: str) -> tuple[ExpertsInput, ExpertsProblem]:
    case = ExpertsInput("interpreted", tokens, hidden=HIDDEN, intermediate=INTERMEDIATE)
    return case, ExpertsProblem.of(case, fmt, "cpu")


def run_small_batch(gpu: Gpu, fmt: str, tokens: int, edit: Edit | None = None) -> Tensor:
    case, given = problem(tokens, fmt)
    few = small_batch.run_direct if tokens <= small_batch.DIRECT_TOKENS else small_batch.run_own_list
    return started(few if tokens <= small_batch.OWN_LIST_TOKENS else small_batch.run_list, gpu, fmt, case, given, edit)


def started(
    run: MoeRun, gpu: Gpu, fmt: str, case: ExpertsInput, given: ExpertsProblem, edit: Edit | None = None
) -> Tensor:
    sizes = (case.num_experts, case.top_k, case.hidden, case.intermediate)
    spec = MoeSpec(*sizes, fmt, Activations.BF16, case.gate, case.bias, case.tokens)
    with interpreted(gpu.sm, edit) as ran:
        y = run(given.packed, spec, gpu, given.x, given.routing)
    listed = {kernel.short_name for kernel in ran} & {"list_small_batch"}
    assert ran
    assert bool(listed) == (run is small_batch.run_list)
    return y


def run_grouped(gpu: Gpu, fmt: str, block_scaled: bool, edit: Edit | None = None) -> Tensor:
    case, given = problem(20, fmt)
    tile = next(iter(possible(grouped.gemm_path(block_format(fmt).bits, block_scaled, fmt == "nvfp4"), gpu)))
    with interpreted(gpu.sm, edit) as ran:
        y = grouped.run(given.packed, case.gate, given.x, given.routing, gpu, block_scaled=block_scaled, tile=tile)
    assert ran
    return y


@pytest.mark.parametrize("card", ["gb10", "a100"])
@pytest.mark.parametrize(("fmt", "tokens"), [("mxfp4", 1), ("mxfp8", 5), ("mxfp4", 9), ("nvfp4", 5), ("fp8_block", 1)])
def test_small_batch_experts(card: str, fmt: str, tokens: int) -> None:
    y = run_small_batch(known(card), fmt, tokens)
    check_rounded(y, problem(tokens, fmt)[1].expected(), "bf16", 2)


OWN_LISTS = [
    ExpertsInput("three tokens", 3, hidden=HIDDEN, intermediate=INTERMEDIATE),
    ExpertsInput("eight tokens on the same experts, three each", 8, num_experts=70, top_k=3, hidden=96, spread="one"),
    ExpertsInput("eight tokens, eight experts each", 8, num_experts=40, top_k=8, hidden=96, gate=GELU, bias=False),
    ExpertsInput(
        "seven tokens, unused experts", 7, num_experts=16, top_k=1, hidden=160, intermediate=96, spread="unused"
    ),
]


@pytest.mark.parametrize(("card", "fmt"), [("gb10", "mxfp4"), ("a100", "mxfp8"), ("h200", "mxfp4")])
@pytest.mark.parametrize("case", OWN_LISTS, ids=lambda case: case.name)
def test_experts_whose_programs_find_their_tiles(card: str, fmt: str, case: ExpertsInput) -> None:
    """To the bit as by the list, whose kernel scales the tokens and places the pairs."""
    given = ExpertsProblem.of(case, fmt, "cpu")
    y = started(small_batch.run_own_list, known(card), fmt, case, given)
    check_rounded(y, given.expected(), "bf16", 2)
    assert torch.equal(y, started(small_batch.run_list, known(card), fmt, case, given))


def test_programs_past_the_end_of_a_list_follow_no_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """There an entry has no expert, and its other fields were never written."""
    allocate = torch.empty

    def used_before(*sizes: Any, **options: Any) -> Tensor:
        made = allocate(*sizes, **options)
        return made.fill_(1 << 20) if made.dtype is torch.int32 else made

    case = ExpertsInput("few of many experts", 9, num_experts=16, hidden=96, intermediate=96, spread="unused")
    given = ExpertsProblem.of(case, "mxfp4", "cpu")
    monkeypatch.setattr(torch, "empty", used_before)
    y = started(small_batch.run_list, known("gb10"), "mxfp4", case, given)
    check_rounded(y, given.expected(), "bf16", 2)


@pytest.mark.parametrize("card", ["gb10", "a100"])
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_grouped_experts(card: str, fmt: str) -> None:
    check_rounded(run_grouped(known(card), fmt, False), problem(20, fmt)[1].expected(), "bf16", 3)


@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp8"])
def test_block_scaled_experts(fmt: str) -> None:
    """SM 12.1's own instruction: which lane holds which scale is Triton's choice, and it is executed."""
    gpu = known("gb10")
    assert gpu.has(Feature.MX_MMA)
    check_rounded(run_grouped(gpu, fmt, True), problem(20, fmt)[1].expected_quantised(), "bf16", 3)


def expected_nvfp4(given: ExpertsProblem) -> Tensor:
    """Where the gate's output is in NVFP4 too."""
    return given.expected_quantised(nvfp4, nvfp4)


def test_nvfp4_experts() -> None:
    gpu = known("gb10")
    expected = expected_nvfp4(problem(20, "nvfp4")[1])
    assert_close(run_grouped(gpu, "nvfp4", True), expected, worst=SAME_NVFP4.worst, rms=SAME_NVFP4.rms)


@pytest.mark.parametrize(
    ("sizes", "fp8"),
    [
        ((8, 1, 64, None, 16, [(300, 1), (17, 1)]), False),  # decode, split-KV
        ((8, 1, 64, None, 16, [(300, 1), (17, 1)]), True),
        ((8, 1, 64, None, 16, [(0, 37)]), False),  # a prompt; in FP8 test_run has one
        ((2, 1, 128, 40, 16, [(70, 9), (200, 1)]), False),  # mixed, with a window; in FP8 test_run has both
    ],
)
def test_attention(sizes: tuple[Any, ...], fp8: bool) -> None:
    heads, kv_heads, head_dim, window, page_size, sequences = sizes
    spec, q, kv, batch = cases_attention.make_case(heads, kv_heads, head_dim, window, page_size, sequences, fp8)
    gpu = known("gb10")
    with interpreted(gpu.sm) as ran:
        y = run_attention(PagedAttention(), spec, gpu, q, kv, batch, None)
    assert ran
    wanted = attention(q, kv, batch, spec, None)
    spread = float(wanted.abs().max() / wanted.square().mean().sqrt())
    assert_close(y, wanted, worst=3 * step("bf16") * spread, rms=3 * rms_step("bf16"))


def test_dense_layer() -> None:
    """What ``test_faults`` puts faults into; ``test_run`` has the other formats."""
    given = cases_dense.make_problem("mxfp4", 20, 144, 352)
    gpu = known("gb10")
    tile = next(iter(possible(GemmPath.W4A16, gpu)))
    with interpreted(gpu.sm) as ran:
        y = gemm.run(pack(given.weights), gpu, given.x, given.residual, block_scaled=False, tile=tile)
    assert ran
    cases_dense.check_bf16(y, given.expected)


def of_the_next_quad(kernel: TritonKernel, ptx: str) -> str:
    """Every block-scaled product takes the rows' scales of the next four lanes. Lanes of one quad hold the same."""
    parts, done = [], 0
    for found in instructions(ptx):
        asked = found.instruction
        if ".block_scale." not in asked.opcode:
            continue
        faulty = PtxInstruction(asked.opcode, (*asked.operands[:4], "%fault", *asked.operands[5:]))
        turn = f"shfl.sync.down.b32 %fault, {asked.operands[4]}, 4, 31, -1;"
        parts += [ptx[done : found.start], f"{{ .reg .b32 %fault; {turn} {faulty} }}"]
        done = found.end
    return "".join([*parts, ptx[done:]])


def test_a_scale_of_the_neighbouring_row_shows() -> None:
    y = run_grouped(known("gb10"), "mxfp8", True, of_the_next_quad)
    assert errors(y, problem(20, "mxfp8")[1].expected_quantised()).rms > 0.1


def test_lanes_agree_on_the_sum_of_splits() -> None:
    """The last program of a sequence adds up its splits in pairs of lanes: all have the same bits, or the interpreter
    would refuse to store them to one address."""
    given = cases_attention.make_fused_case((5, 1, 64, None, 64, [600]), False, (False, False, False))
    gpu = known("gb10")
    with interpreted(gpu.sm) as ran, cases_attention.fused_up_to(1, 64):
        out = run_fused(
            PagedAttention(), given.spec, gpu, given.qkv, given.transform, given.copy_of_kv(), given.batch, given.sinks
        )
    assert {kernel.short_name for kernel in ran} == {"attend_fused"}
    assert not out.isnan().any()


# ---- codes of an FP8 cache -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("card", ["h200", "a100"])
def test_kv_codes_are_those_of_a_division(card: str) -> None:
    """Every bf16 number from a quarter of the smallest code to four times the largest, by divisors whose inverses are
    exact, short and long: ties too are rounded as the quotient is."""
    gpu, heads, dim, page_size = known(card), 4, 512, 4
    bits = torch.arange((127 - 11) << 7, (127 + 11) << 7, dtype=torch.int32)
    sizes = (bits << 16).view(torch.float32)
    numbers = torch.cat([sizes, -sizes, torch.zeros(512)])
    tokens = -(-numbers.numel() // dim)
    numbers = torch.nn.functional.pad(numbers, (0, tokens * dim - numbers.numel())).reshape(tokens, 1, dim)
    scales = torch.tensor([1.0, 0.75, 0.7, 0.0312347])
    rows = (numbers * 2.0 ** scales.log2().round()[None, :, None]).bfloat16()
    qkv = torch.cat([rows[:, :1], rows, rows.flip(2)], dim=1)
    pages = -(-tokens // page_size)
    k, v = (torch.zeros(pages, heads, page_size, dim, dtype=torch.uint8) for _ in range(2))
    kv = PagedKv(k, v, scales, 1.1 * scales)
    still = RopeTable(torch.zeros(dim // 2), 1.0)
    positions, slots = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens)
    with interpreted(gpu.sm) as ran:
        TritonSmall(gpu).rope_and_write_kv(qkv, 1, positions, still, kv, slots)
    assert ran
    for codes, x, scale in ((kv.k, rows, scales), (kv.v, rows.flip(2), 1.1 * scales)):
        want = round_e4m3(x.float() / scale[:, None])
        found = codes.transpose(1, 2).reshape(pages * page_size, heads, dim)[:tokens]
        assert torch.equal(found, want)
