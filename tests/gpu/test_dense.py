"""Dense layers on the present GPU: the kernels for small batches, which no interpreter runs, and the others' cases."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cases_dense import (  # noqa: F401
    GPU,
    check_bf16,
    check_logits,
    make_problem,
    roundings_of,
    test_gemm,
    test_gemm_logits,
    test_many_tokens_go_through_an_unpacked_copy,
    test_no_tokens,
    test_the_epilogue_of_other_peoples_logits,
    test_unpacked_weights_are_the_weights,
)
from microscale.errors import Unsupported
from microscale.formats import MXFP8, decode, encode
from microscale.hardware.tiles.dense import DenseFormat, columns_of, possible
from microscale.kernels.dense import small_batch
from microscale.kernels.dense.packed import PackedDense, pack, row_major
from microscale.kernels.dense.reference import capped, dense, summarise
from microscale.kernels.dense.spec import FORMATS, DenseOp, DenseSpec
from microscale.kernels.op import Activations
from microscale.kernels.small import norms
from microscale.planning import registry
from microscale_lab.calls import run_dense, run_from_sum, run_logits
from microscale_lab.cases import dense_from_sum
from microscale_lab.cases.case import hold
from microscale_lab.cases.dense import DenseProblem, bf16_bound, hold_logits, logits_bound, make_weights
from microscale_lab.cases.dense_from_sum import FromSumCase, FromSumTileCase, make_summed
from microscale_lab.cases.errors import step

pytestmark = pytest.mark.odd_shapes
IMPLEMENTATIONS: list[DenseOp[Any]] = [registry.dense(f"triton_{fmt}") for fmt in FORMATS]
# One token, odd numbers of tokens, more than a program's columns, every column count; K of half a tile, of fewer tiles
# than slices, of a real layer; rows of one tile, of no whole block.
SHAPES = [
    (1, 128, 2880),
    (3, 2880, 4096),
    (8, 48, 96),
    (13, 4000, 704),
    (16, 16, 32),
    (2, 5120, 2880),
    (37, 2880, 704),
    (20, 144, 352),
]


def packed_of(problem: DenseProblem) -> PackedDense:
    weights = problem.weights
    return row_major(weights) if weights.format == "bf16" else pack(weights)


def spec_of(problem: DenseProblem, activations: Activations = Activations.BF16) -> DenseSpec:
    weights = problem.weights
    rows, columns = weights.weight.shape
    return DenseSpec(rows, columns, weights.format, activations, weights.bias is not None, len(problem.x))


def run(implementation: DenseOp[Any], problem: DenseProblem, x: Tensor | None = None) -> Tensor:
    spec = spec_of(problem)
    assert implementation.supports(spec, GPU) is None
    packed = implementation.pack(problem.weights, spec)
    return run_dense(implementation, packed, spec, GPU, problem.x if x is None else x, problem.residual)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("tokens, rows, columns", SHAPES)
def test_few_tokens(fmt: str, tokens: int, rows: int, columns: int) -> None:
    problem = make_problem(fmt, tokens, rows, columns, bias=tokens != 3)
    packed = packed_of(problem)
    sizes = columns_of(DenseFormat(fmt))
    for tile in possible(fmt, next((size for size in sizes if tokens <= size), sizes[-1]), GPU):
        check_bf16(small_batch.run(packed, GPU, problem.x, problem.residual, tile), problem.expected)
        check_bf16(small_batch.run(packed, GPU, problem.x, None, tile), dense(problem.x, problem.weights))
        check_logits(
            small_batch.run_logits(packed, GPU, problem.x, tile=tile), dense(problem.x, problem.weights), columns
        )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
@pytest.mark.parametrize("tokens", [17, 100, 200, 300])
def test_more_tokens(implementation: DenseOp[Any], tokens: int) -> None:
    fmt = implementation.name.removeprefix("triton_")
    problem = make_problem(fmt, tokens, 720, 2880)
    check_bf16(run(implementation, problem), problem.expected, roundings_of(fmt, tokens, 720))


@pytest.mark.parametrize("name", ["dequantized", *(i.name for i in IMPLEMENTATIONS)])
def test_logits_of_an_lm_head(name: str) -> None:
    """262144 rows (and few columns): no index may be cut to 32 bits."""
    implementation = registry.dense(name)
    fmt = "bf16" if name == "dequantized" else name.removeprefix("triton_")
    for tokens in (2, 40):
        problem = make_problem(fmt, tokens, 262144, 64, bias=False)
        packed = implementation.pack(problem.weights, spec_of(problem))
        logits = run_logits(implementation, packed, spec_of(problem), GPU, problem.x)
        expected, bound = dense(problem.x, problem.weights), logits_bound(64)
        if fmt == "fp8_block" and tokens > small_batch.MAX_TOKENS:
            bound = bf16_bound(expected)  # a GEMM rounds the weights
        hold(hold_logits(logits, expected, bound))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
@pytest.mark.parametrize("tokens", [1, 13, 40])
def test_capped_logits_have_the_blocks_of_what_they_are(implementation: DenseOp[Any], tokens: int) -> None:
    problem = make_problem(implementation.name.removeprefix("triton_"), tokens, 1008, 352)
    spec, x = spec_of(problem), problem.x * 40
    packed = implementation.pack(problem.weights, spec)
    plain = run_logits(implementation, packed, spec, GPU, x).values
    assert plain.abs().max() > 30
    found = run_logits(implementation, packed, replace(spec, softcap=30.0), GPU, x)
    # Eight roundings of numbers up to 1, times 30: two each of the exponential and the quotient, which a GPU only
    # approximates, one of the difference and of the product; torch's own tanh and product.
    torch.testing.assert_close(found.values, capped(plain, 30.0), rtol=0, atol=30 * 8 * step("float32"))
    blocks = summarise(found.values, found.block_rows)
    assert torch.equal(found.block_max, blocks.block_max)
    assert torch.equal(found.block_argmax, blocks.block_argmax)
    torch.testing.assert_close(found.block_sum, blocks.block_sum, rtol=1e-5, atol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
@pytest.mark.parametrize("tokens", [2, 16, 40])
def test_a_broken_token_shows_and_stays_alone(implementation: DenseOp[Any], tokens: int) -> None:
    problem = make_problem(implementation.name.removeprefix("triton_"), tokens, 144, 352)
    x = problem.x.clone()
    x[0, 17] = math.nan
    y = run(implementation, problem, x)
    assert y[0].isnan().all()
    assert not y[1:].isnan().any()
    packed = implementation.pack(problem.weights, spec_of(problem))
    logits = run_logits(implementation, packed, spec_of(problem), GPU, x)
    assert logits.block_max[0].isnan().all()
    assert not logits.block_max[1:].isnan().any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_graph_follows_new_tokens_and_repeats_itself(implementation: DenseOp[Any], tokens: int) -> None:
    problem = make_problem(implementation.name.removeprefix("triton_"), tokens, 2880, 352)
    x = problem.x.clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(implementation, problem, x)
    torch.cuda.synchronize()
    spec = spec_of(problem)
    packed = implementation.pack(problem.weights, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run_dense(implementation, packed, spec, GPU, x, problem.residual)
    for shift in range(3):
        x.copy_(problem.x.roll(shift, dims=1))
        graph.replay()
        check_bf16(y, dense(x, problem.weights, problem.residual))
        first = y.clone()
        graph.replay()
        assert torch.equal(y, first)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_mxfp8_activations(fmt: str) -> None:
    implementation = registry.dense(f"triton_{fmt}_a8")
    problem = make_problem(fmt, 100, 720, 2880)
    spec = spec_of(problem, Activations.MXFP8)
    if implementation.supports(spec, GPU) is not None:
        pytest.skip("needs a block-scaled matrix instruction")
    packed = implementation.pack(problem.weights, spec)
    y = run_dense(implementation, packed, spec, GPU, problem.x, problem.residual)
    check_bf16(y, dense(decode(encode(problem.x, MXFP8)), problem.weights, problem.residual))


def test_other_types_are_refused() -> None:
    problem = make_problem("bf16", 3, 32, 64)
    with pytest.raises(Unsupported, match=r"reads rows of bfloat16, not torch\.float32"):
        run(IMPLEMENTATIONS[0], problem, problem.x.float())


# ---- with the sum and the norm before it -----------------------------------------------------------------------------

FROM_SUM = [case for case in dense_from_sum.cases() if isinstance(case, FromSumCase)]


def layer_behind_a_sum(fmt: str, rows: int, columns: int) -> DenseSpec:
    return DenseSpec(rows, columns, fmt, Activations.BF16, True, 1, behind_sum=True)


def skip_where_refused(case: FromSumCase) -> None:
    reason = case.refuses(GPU)
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("case", FROM_SUM, ids=lambda case: f"{case.spec.weight_format}, {case.name}")
def test_a_sum_and_its_norm_in_the_layers_launch(case: FromSumCase) -> None:
    skip_where_refused(case)
    hold(case.start(GPU, "cuda")())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rows, columns", [(5120, 2880), (5120, 2048), (2560, 2880)])
def test_a_real_layer_from_a_sum(fmt: str, rows: int, columns: int) -> None:
    """More programs than the card holds at once: who stores the sum, and who reads it."""
    entry = registry.dense(f"triton_{fmt}")
    case = FromSumTileCase("a real layer", entry, layer_behind_a_sum(fmt, rows, columns))
    skip_where_refused(case)
    hold(case.start(GPU, "cuda")())


@pytest.mark.parametrize("fmt", ["bf16", "mxfp4"])
def test_a_chain_of_layers_from_sums_in_a_graph(fmt: str) -> None:
    """Each reads what the launch before it wrote, sum and answer, under programmatic dependent launch."""
    entry, width, depth = registry.dense(f"triton_{fmt}"), 2880, 24
    spec = layer_behind_a_sum(fmt, width, width)
    skip_where_refused(FromSumCase("a chain", entry, spec))
    packed = entry.pack(make_weights(fmt, width, width, "cuda"), spec)
    given = make_summed(width, "cuda")

    def together(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(depth):
            x, stream = run_from_sum(entry, packed, spec, GPU, replace(given, x=x, residual=stream))
        return x, stream

    def apart(x: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(depth):
            normed, stream = norms.norm(x, stream, given.weight, given.epsilon, pdl=True)
            x = run_dense(entry, packed, spec, GPU, normed)
        return x, stream

    x = given.x.clone()
    together(x, given.residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, stream = together(x, given.residual)
    for seed in range(20):
        x.copy_(make_summed(width, "cuda", seed).x)
        graph.replay()
        want, want_stream = apart(x, given.residual)
        assert torch.equal(stream, want_stream)
        assert torch.equal(y, want)


def test_a_broken_token_from_a_sum_shows() -> None:
    case = next(case for case in FROM_SUM if case.spec.weight_format == "mxfp4")
    skip_where_refused(case)
    summed = make_summed(case.spec.columns, "cuda")
    summed.residual[0, 17] = math.nan
    packed = case.entry.pack(case.weights("cuda"), case.spec)
    y, total = run_from_sum(case.entry, packed, case.spec, GPU, summed)
    assert y.isnan().all()
    assert total.isnan().sum() == 1
