"""Paged attention in Triton against the reference. Runs under the interpreter, or on a GPU where there is one.

Inputs are bf16 in both, so what differs is the rounding of the softmax's weights to bf16 before they meet the values,
of the output to bf16, and sums in another order. Slots that no query may see hold NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from microscale import hardware
from microscale.errors import Unsupported
from microscale.hardware import Gpu
from microscale.hardware.tiles import attention as attention_tiles
from microscale.hardware.tiles import tuned
from microscale.hardware.tiles.attention import Heads, Kv, split_kv, wanted_splits
from microscale.kernels.attention import paths as attention_paths
from microscale.kernels.attention import widen
from microscale.kernels.attention.fused_decode import kinds
from microscale.kernels.attention.paged import PagedAttention
from microscale.kernels.attention.paths import parts_of, tile_of
from microscale.kernels.attention.reference import attention
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, BatchShape, HeadsKind, PagedKv
from microscale.kernels.op import Activations
from microscale.kernels.small.fused import TritonSmall
from microscale.kernels.small.reference import rope_and_write_kv
from microscale.planning.paths import PathList, ask, path_of
from microscale_lab.calls import run_attention, run_fused
from microscale_lab.cases import fused_attention as fused_cases
from microscale_lab.cases.attention import (
    DRAFTED,
    LARGE,
    LARGE_DRAFTED,
    SHAPES,
    Batch,
    Shape,
    attention_bound,
    make_batch,
    make_sinks,
)
from microscale_lab.cases.errors import assert_close, step
from microscale_lab.cases.fused_attention import (
    KINDS,
    PLAIN_HEADS,
    FusedProblem,
    FusedShape,
    fused_bound,
    make_fused,
    make_heads,
    one_of_three,
)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GPU = hardware.detect() if ON_GPU else hardware.known("gb10")


CASES = SHAPES + (LARGE if ON_GPU else [])
FUSED = fused_cases.SHAPES + (fused_cases.LARGE if ON_GPU else [])
VERIFY = fused_cases.VERIFY + (fused_cases.LARGE_VERIFY if ON_GPU else [])


def make_case(
    heads: int, kv_heads: int, dim: int, window: int | None, page_size: int, sequences: list[tuple[int, int]], fp8: bool
) -> Batch:
    return make_batch((heads, kv_heads, dim, window, page_size, sequences), fp8, DEVICE)


def check_attention(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = attention_bound(expected)
    assert_close(actual, expected, worst=bound.worst, rms=bound.rms)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("sink", [None, 0.0, 30.0, -30.0])
def test_triton_is_the_reference(case: Shape, fp8: bool, sink: float | None) -> None:
    if not ON_GPU and sink != 0.0 and (fp8 or case in CASES[8:]):
        pytest.skip("The interpreter is slow; sinks meet neither fp8 nor the size of heads in the code.")
    spec, q, kv, batch = make_case(*case, fp8)
    implementation = PagedAttention()
    assert implementation.supports(spec, GPU) is None
    sinks = make_sinks(spec.num_heads, sink, DEVICE)
    want = attention(q, kv, batch, spec, sinks)
    out = run_attention(implementation, spec, GPU, q, kv, batch, sinks)
    assert out.dtype == torch.bfloat16
    if sink == 30.0:
        # The sink takes nearly all weight: outputs are tiny, and so is their scale.
        assert float(want.abs().max()) < 1e-3
    check_attention(out, want)


@pytest.mark.parametrize("case", DRAFTED + (LARGE_DRAFTED if ON_GPU else []), ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_drafts_are_the_reference(case: Shape, fp8: bool) -> None:
    """Several new tokens of a sequence by split-KV, beside sequences that have one, or none."""
    if not ON_GPU and fp8 and case[-1][0][0] > 1000:
        pytest.skip("The interpreter is slow; how keys are stored meets no split in the code.")
    spec, q, kv, batch = make_batch(case, fp8, DEVICE, verify=True)
    sinks = make_sinks(spec.num_heads, 0.0, DEVICE)
    want = attention(q, kv, batch, spec, sinks)
    check_attention(run_attention(PagedAttention(), spec, GPU, q, kv, batch, sinks), want)


def test_drafts_run_by_split_kv_and_prompts_do_not() -> None:
    """Eight tokens of gpt-oss, whose KV heads have eight query heads each; what is no draft runs as it did."""
    spec, _, kv, batch = make_case(64, 8, 64, None, 16, [(300, 8), (40, 1)], False)
    entry = PagedAttention()
    for new, verify, want in (
        (1, False, "decode"),
        (2, False, "decode"),
        (3, False, "mixed"),
        (8, False, "mixed"),
        (2, True, "decode"),
        (8, True, "decode"),
        (16, True, "mixed"),
    ):
        shape = replace(BatchShape.of(kv, batch), longest_query=new, verify=verify)
        path = path_of(entry, PathList.RUN, replace(spec, batch=shape), GPU)
        assert path.name.startswith(want), (new, verify)


# ---- FP8 keys of a prompt in bf16 ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fp8", "sequences", "new", "pages", "said"),
    [
        (True, 1, 64, 100, None),
        (True, 3, 64, 100, None),
        (False, 1, 64, 100, "is for keys and values in FP8"),
        (True, 1, 63, 100, "pays from 512 query rows of a KV head on, not 504"),
        (True, 1, 64, 8192 * 4, "would need 1024 MiB for the copy; it has up to 512"),
        (True, 3, 64, 8192, "would need 768 MiB for the copy; it has up to 512"),
    ],
)
def test_who_copies_keys(fp8: bool, sequences: int, new: int, pages: int, said: str | None) -> None:
    """Eight query heads of gpt-oss share a KV head; a position is 2 KiB in bf16."""
    spec = make_case(64, 8, 64, None, 16, [(300, 8)], fp8)[0]
    spec = replace(spec, batch=BatchShape(sequences, new, pages, fp8))
    path = path_of(PagedAttention(), PathList.RUN, spec, GPU)
    assert path.name.endswith(widen.COPY) == (said is None)
    assert path.name.startswith("prefill" if sequences == 1 else "mixed")
    assert widen.refuses(spec, GPU) == said


@pytest.mark.parametrize("window", [None, 7, 100])
@pytest.mark.parametrize("sms", [1, 132])
def test_the_copy_is_exact(window: int | None, sms: int) -> None:
    """Everything that some new token sees, as the codes say, without their scales; by programs that take one block
    each, or several."""
    gpu = replace(GPU, num_sms=sms)
    sequences = [(0, 50), (33, 20), (100, 1), (200, 9)]
    spec, _, kv, batch = make_case(16, 2, 64, window, 16, sequences, True)
    wide, there = widen.widen(spec, gpu, kv, batch, window or 1 << 30, 1)
    assert wide.k_scale is None
    assert wide.k.shape[0] == 4 * (14 if window is None else min(14, -(-(window + 50) // 16) + 1))
    for seq, (cached, new) in enumerate(sequences):
        if new == 1:
            continue
        seen = torch.arange(0 if window is None else max(0, cached - window + 1), cached + new, device=DEVICE)
        page, copied = (each.page_table[seq, seen // 16].long() for each in (batch, there))
        assert len(copied.unique()) == len(page.unique())
        for codes, numbers in ((kv.k, wide.k), (kv.v, wide.v)):
            want = codes[page, :, seen % 16].view(torch.float8_e4m3fn).float()
            assert torch.equal(numbers[copied, :, seen % 16].float(), want)


def against_reference(spec: AttentionSpec, q: torch.Tensor, kv: PagedKv, batch: AttentionBatch) -> torch.Tensor:
    want = attention(q, kv, batch, spec, None)
    out = run_attention(PagedAttention(), spec, GPU, q, kv, batch, None)
    check_attention(out, want)
    return out


@pytest.mark.parametrize("new", [1, 20])
def test_pages_in_every_order(new: int) -> None:
    """The same numbers on pages that lie in order, backwards, and apart: the same bits come out."""
    spec, q, kv, batch = make_case(8, 1, 64, None, 16, [(300, new)], False)
    pages = batch.page_table.shape[1]
    outs = []
    for order in (list(range(pages)), list(range(pages))[::-1], list(range(0, 2 * pages, 2))):
        table = torch.tensor([order], dtype=torch.int32, device=DEVICE)
        shape = (2 * pages, *kv.k.shape[1:])
        moved = PagedKv(*(torch.full(shape, math.nan, device=DEVICE).bfloat16() for _ in range(2)))
        for cache, source in ((moved.k, kv.k), (moved.v, kv.v)):
            cache[table[0].long()] = source[batch.page_table[0].long()]
        there = AttentionBatch(batch.query_start, batch.context_lens, table, new)
        outs.append(against_reference(spec, q, moved, there))
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("codes", [(0x7E, 0xFE), (0x01, 0x87), (0x00, 0x80), (0x08, 0x7E)], ids=str)
@pytest.mark.parametrize("new", [1, 40])
def test_e4m3_at_its_ends(codes: tuple[int, int], new: int) -> None:
    """Codes that are all largest, all subnormal, or zeros of both signs; one scale for the whole tensor."""
    spec, q, kv, batch = make_case(8, 1, 64, None, 16, [(100, new)], True)
    generator = torch.Generator().manual_seed(0)
    choice = torch.randint(0, 2, kv.k.shape, generator=generator)
    bytes_ = torch.tensor(codes, dtype=torch.uint8)[choice].to(DEVICE)
    largest = float(bytes_.view(torch.float8_e4m3fn).float().abs().max()) or 1.0
    k_scale, v_scale = (torch.tensor([size / largest], device=DEVICE) for size in (0.3, 3.0))
    out_kv = PagedKv(bytes_, bytes_.flip(0), k_scale, v_scale)
    want = attention(q, out_kv, batch, spec, None)
    out = run_attention(PagedAttention(), spec, GPU, q, out_kv, batch, None)
    if not want.any():
        assert not out.any()
        return
    # Values of both signs cancel: the error is relative to the values, not to their sum.
    size = float(v_scale) * largest
    assert float((out.float() - want).abs().max()) <= 3 * step("bf16") * size


def test_the_scale_of_the_scores() -> None:
    spec, q, kv, batch = make_case(16, 1, 64, None, 16, [(60, 1), (5, 1)], False)
    against_reference(replace(spec, scale=1.0), q / 8, kv, batch)


@pytest.mark.parametrize(
    "case",
    [
        (8, 1, 64, None, [(2600, 1), (900, 1)]),
        (8, 1, 64, None, [(1500, 1), (900, 1)]),
        (4, 2, 256, 200, [(300, 1), (90, 1)]),
    ],
)
def test_splits_add_up_in_order(case: tuple[int, int, int, int | None, list[tuple[int, int]]]) -> None:
    """By a launch of their own, or by the last program: the second call finds its counters as the first left them."""
    heads, kv_heads, dim, window, sequences = case
    spec, q, kv, batch = make_case(heads, kv_heads, dim, window, 16, sequences, False)
    outs = [run_attention(PagedAttention(), spec, GPU, q, kv, batch, None) for _ in range(3)]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
@pytest.mark.parametrize(
    ("heads", "longest"), [((64, 8, 64), (3001, 5001, 21)), ((16, 8, 256), (901, 1001, 21))], ids=str
)
def test_a_graph_reads_lengths_and_tables_on_the_device(
    heads: tuple[int, int, int], longest: tuple[int, int, int]
) -> None:
    """Splits with a launch for their sum, and so few that the last program adds them up."""
    spec, q, kv, batch = make_case(*heads, None, 16, [(n - 1, 1) for n in longest], False)
    run_attention(PagedAttention(), spec, GPU, q, kv, batch, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_attention(PagedAttention(), spec, GPU, q, kv, batch, None)
    for lens in (longest, [1, 77, 2], [longest[0] - 2, 300, 16]):
        batch.context_lens.copy_(torch.tensor(lens))
        graph.replay()
        want = attention(q, kv, batch, spec, None)
        check_attention(out, want)


def make_fused_case(
    case: FusedShape, fp8: bool, kind: HeadsKind, sink: float | None = None, empty: int | None = None
) -> FusedProblem:
    return make_fused(case, fp8, kind, DEVICE, sink, empty)


@contextmanager
def fused_up_to(sequences: int, head_dim: int) -> Iterator[None]:
    """Meanwhile so many sequences decode, with drafts or without, in one launch."""
    split = replace(split_kv(head_dim, GPU), fused_sequences=sequences)
    with (
        tuned.trial(attention_tiles.SPLIT_SECTION, GPU.family, Heads(head_dim, Kv.BF16), split),
        patch.object(attention_paths, "VERIFY_SEQUENCES", sequences),
    ):
        yield


def check_fused_out(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = fused_bound(expected)
    assert_close(actual, expected, worst=bound.worst, rms=bound.rms)


def check_fused(problem: FusedProblem) -> None:
    """Against the two references, and what is in the cache against the two launches' answer."""
    spec, transform, batch = problem.spec, problem.transform, problem.batch
    ours, exact, apart = problem.copy_of_kv(), problem.copy_of_kv(), problem.copy_of_kv()
    heads = (spec.num_heads, problem.positions, transform.rope)
    q = rope_and_write_kv(problem.qkv, *heads, exact, problem.slots, transform.norms)
    want = attention(q, exact, batch, spec, problem.sinks)
    with fused_up_to(batch.context_lens.shape[0], spec.head_dim):
        out = run_fused(PagedAttention(), spec, GPU, problem.qkv, transform, ours, batch, problem.sinks)
    assert out.shape == q.shape
    # A head's sum of squares in another order: now and then a rounding to bf16, or then to E4M3, is the other one.
    TritonSmall(GPU).rope_and_write_kv(problem.qkv, *heads, apart, problem.slots, transform.norms)
    for name, got, ref in (("k", ours.k, apart.k), ("v", ours.v, apart.v)):
        bits = got if got.dtype == torch.uint8 else got.view(torch.int16)
        bits_ref = ref if ref.dtype == torch.uint8 else ref.view(torch.int16)
        distance = (bits.int() - bits_ref.int()).abs()
        page, offset = problem.slots // spec.page_size, problem.slots % spec.page_size
        newest = distance[page, :, offset]
        assert int(distance.sum()) == int(newest.sum()), f"{name}: written outside of the newest slots"
        if newest.numel():
            assert int(newest.max()) <= 1, f"{name}: not what rope_and_write_kv writes, by {int(newest.max())} steps"
            assert float((newest > 0).float().mean()) < 0.01, f"{name}: {(newest > 0).float().mean()} differ"
    check_fused_out(out, want)


@pytest.mark.parametrize("case", FUSED, ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=[name.replace(" ", "_") for name in KINDS])
def test_heads_to_attention_in_one_launch(case: FusedShape, fp8: bool, kind: HeadsKind) -> None:
    if kind not in kinds(case[2]):
        pytest.skip("no kernel: no model has such heads")
    if not ON_GPU and not one_of_three(FUSED.index(case), fp8, kind, case[2]):
        pytest.skip("one of three: the interpreter is slow")
    check_fused(make_fused_case(case, fp8, kind, sink=None if kind[0] else 0.5))


@pytest.mark.parametrize("case", VERIFY, ids=str)
def test_drafts_are_verified_in_one_launch(case: Shape) -> None:
    check_fused(make_heads(case, False, PLAIN_HEADS, DEVICE, sink=0.5, verify=True))


@pytest.mark.parametrize("sink", [None, 30.0, -30.0])
def test_drafts_in_one_launch_with_sinks(sink: float | None) -> None:
    check_fused(
        make_heads((16, 2, 64, None, 16, [(0, 4), (20, 2), (600, 3)]), False, PLAIN_HEADS, DEVICE, sink, verify=True)
    )


def test_drafts_are_what_decode_gives_token_by_token() -> None:
    """Four tokens at once and one after another: the same cache, and answers within a rounding of each other."""
    cached = [300, 13, 127]
    problem = make_heads((8, 1, 64, 128, 16, [(n, 4) for n in cached]), False, PLAIN_HEADS, DEVICE, 0.5, verify=True)
    together, apart = problem.copy_of_kv(), problem.copy_of_kv()
    arguments = problem.spec, GPU
    with fused_up_to(len(cached), problem.spec.head_dim):
        out = run_fused(
            PagedAttention(), *arguments, problem.qkv, problem.transform, together, problem.batch, problem.sinks
        )
    starts = torch.arange(len(cached) + 1, dtype=torch.int32, device=DEVICE)
    for token in range(4):
        lens = torch.tensor(cached, dtype=torch.int32, device=DEVICE) + token + 1
        batch = AttentionBatch(starts, lens, problem.batch.page_table, 1)
        qkv = problem.qkv[token::4].contiguous()
        one = run_fused(PagedAttention(), *arguments, qkv, problem.transform, apart, batch, problem.sinks)
        check_fused_out(out[token::4], one.float())
    for ours, theirs in ((together.k, apart.k), (together.v, apart.v)):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_drafts_in_one_launch_with_rows_of_no_one() -> None:
    """Rows that fill a graph's batch share a page that belongs to nobody; sequences without a token are left alone."""
    sequences = [(70, 3), (0, 4), (0, 4), (0, 0)]
    problem = make_heads((8, 2, 64, None, 16, sequences), False, PLAIN_HEADS, DEVICE, verify=True)
    problem.batch.page_table[1:] = problem.batch.page_table[1, 0]
    problem.batch.context_lens[3] = 0
    ours = problem.copy_of_kv()
    with fused_up_to(len(sequences), problem.spec.head_dim):
        out = run_fused(PagedAttention(), problem.spec, GPU, problem.qkv, problem.transform, ours, problem.batch)
    alone = replace(
        problem.batch, query_start=problem.batch.query_start[:2].clone(), context_lens=problem.batch.context_lens[:1],
        page_table=problem.batch.page_table[:1],
    )  # fmt: skip
    theirs = problem.copy_of_kv()
    want = run_fused(
        PagedAttention(), problem.spec, GPU, problem.qkv[:3].contiguous(), problem.transform, theirs, alone
    )
    assert torch.equal(out[:3], want)
    assert not out.isnan().any()
    values = problem.qkv[3::4, -2:].repeat_interleave(4, dim=1)  # the first of nobody's tokens sees its own value
    assert torch.equal(out[3::4], values)


def drafted_spec(heads: tuple[int, int, int], new: int, shape: BatchShape) -> AttentionSpec:
    return AttentionSpec(*heads, None, True, 16, Activations.BF16, new, 128, batch=shape)


@pytest.mark.parametrize("card", ["h200", "b200", "gb10"])
@pytest.mark.parametrize(("new", "parts"), [(2, 1), (3, 2), (4, 2)])
def test_which_drafts_are_one_launch(card: str, new: int, parts: int) -> None:
    """Blocks of 16 rows, of which as many share a sequence as its tokens times heads of a group need."""
    gpu = hardware.known(card)
    spec = drafted_spec((64, 8, 64), new, BatchShape(2, new, 8, False, PLAIN_HEADS, verify=True))
    path = ask(PagedAttention(), PathList.FUSED, spec, gpu).path
    assert path is not None
    assert path.name == "fused verify, one pass"
    tile = tile_of(spec, gpu, False, decode=True, fused=True)
    assert (tile.block_m, tile.block_n, tile.warps, tile.stages, tile.early) == (16, 128, 8, 2, 2)
    assert parts_of(spec, tile) == parts


@pytest.mark.parametrize(
    ("heads", "new", "fp8", "kind", "reason"),
    [
        ((64, 8, 64), 5, False, PLAIN_HEADS, "pays up to 4 new tokens of a sequence, not 5"),
        ((64, 8, 64), 2, True, PLAIN_HEADS, "pays with bf16 KV and heads of 64, not fp8 KV and heads of 64"),
        ((32, 4, 128), 2, False, PLAIN_HEADS, "pays with bf16 KV and heads of 64, not bf16 KV and heads of 128"),
        ((16, 8, 256), 8, False, KINDS["normed"], "pays with bf16 KV and heads of 64, not bf16 KV and heads of 256"),
        ((64, 8, 64), 2, False, KINDS["normed"], "pays with heads without norms that have values of their own"),
        ((12, 2, 64), 2, False, PLAIN_HEADS, "takes a power of two of query heads per KV head, not 6"),
    ],
)
def test_which_drafts_run_apart(heads: tuple[int, int, int], new: int, fp8: bool, kind: HeadsKind, reason: str) -> None:
    spec = drafted_spec(heads, new, BatchShape(1, new, 8, fp8, kind, verify=True))
    for card in ("h200", "gb10"):
        found = ask(PagedAttention(), PathList.FUSED, spec, hardware.known(card))
        assert found.path is None
        reasons = {entry.reason for entry in found.rejected if entry.name.startswith("fused verify")}
        assert reasons == {reason}


@pytest.mark.parametrize("sink", [None, 0.0, 30.0, -30.0])
def test_one_launch_with_sinks(sink: float | None) -> None:
    check_fused(make_fused_case((16, 2, 64, None, 16, [1, 20, 600]), False, PLAIN_HEADS, sink))


def test_one_launch_and_a_sequence_without_a_token() -> None:
    check_fused(make_fused_case((8, 1, 64, None, 16, [5, 300, 70]), False, PLAIN_HEADS, 0.0, empty=1))


def test_one_launch_with_rows_of_no_one() -> None:
    """Rows that fill a graph's batch share one slot of a page that belongs to nobody: none sees another's key."""
    problem = make_fused_case((8, 2, 64, None, 16, [70, 1, 1, 1]), False, PLAIN_HEADS)
    problem.batch.page_table[1:] = problem.batch.page_table[1, 0]
    ours = problem.copy_of_kv()
    out = run_fused(PagedAttention(), problem.spec, GPU, problem.qkv, problem.transform, ours, problem.batch)
    values = problem.qkv[1:, -2:].repeat_interleave(4, dim=1)  # a context of one token: its value
    assert torch.equal(out[1:], values)
    assert not out.isnan().any()


def test_what_is_not_one_launch() -> None:
    problem = make_fused_case((8, 2, 64, None, 16, [70, 1]), False, PLAIN_HEADS)
    arguments = (problem.qkv, problem.transform, problem.kv)

    def refused(spec: AttentionSpec, gpu: Gpu, batch: AttentionBatch, reason: str) -> None:
        with pytest.raises(Unsupported, match=reason):
            run_fused(PagedAttention(), spec, gpu, *arguments, batch)

    refused(problem.spec, GPU, replace(problem.batch, max_query_len=2), "one new token of each sequence, not 2")
    refused(
        problem.spec,
        GPU,
        replace(problem.batch, max_query_len=2),
        "fused verify, one pass is for sequences with drafts",
    )
    drafts = replace(problem.batch, max_query_len=2, verify=True)
    refused(
        problem.spec, hardware.known("rtx4090"), drafts, "fused verify, one pass needs programmatic dependent launch"
    )
    with fused_up_to(1, problem.spec.head_dim):
        refused(problem.spec, GPU, drafts, "fused verify, one pass pays up to 1 sequences, not 2")
    refused(problem.spec, hardware.known("rtx4090"), problem.batch, "needs programmatic dependent launch")
    refused(replace(problem.spec, num_heads=30), GPU, problem.batch, "up to 14 query heads per KV head, not 15")
    with fused_up_to(0, problem.spec.head_dim):
        refused(problem.spec, GPU, problem.batch, "up to 0 sequences, not 2")
    refused(replace(problem.spec, head_dim=256), GPU, problem.batch, "these are not all normed")


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
@pytest.mark.parametrize(
    "heads", [(64, 8, 64, None, False), (16, 8, 256, 1024, True), (16, 2, 512, None, True)], ids=str
)
def test_a_graph_of_one_launch(heads: tuple[int, int, int, int | None, bool]) -> None:
    """Lengths that change between replays, and the keys of the replay before among those that are read."""
    num_heads, kv_heads, dim, window, norm = heads
    # Within the window: keys that it has left are broken on purpose.
    lengths = [1500 if window is None else window, 700, 30]
    problem = make_fused_case((num_heads, kv_heads, dim, window, 16, lengths), False, (norm, norm, norm and dim == 512))
    spec, batch, transform = problem.spec, problem.batch, problem.transform
    ours, exact = problem.copy_of_kv(), problem.copy_of_kv()
    run_fused(PagedAttention(), spec, GPU, problem.qkv, transform, problem.copy_of_kv(), batch)
    graph = torch.cuda.CUDAGraph()
    batch.context_lens.sub_(8)
    with torch.cuda.graph(graph):
        out = run_fused(PagedAttention(), spec, GPU, problem.qkv, transform, ours, batch)
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        batch.context_lens.add_(1)
        problem.qkv.copy_(torch.randn(problem.qkv.shape, generator=generator) * 2)
        graph.replay()
        positions = batch.context_lens.long() - 1
        slots = batch.page_table.long().gather(1, positions[:, None] // 16)[:, 0] * 16 + positions % 16
        q = rope_and_write_kv(problem.qkv, spec.num_heads, positions, transform.rope, exact, slots, transform.norms)
        want = attention(q, exact, batch, spec, None)
        check_fused_out(out, want)


@pytest.mark.skipif(not ON_GPU, reason="graphs need a GPU")
@pytest.mark.parametrize("window", [None, 128])
def test_a_graph_of_drafts_in_one_launch(window: int | None) -> None:
    """Numbers of tokens and lengths that change between replays, and keys of the replay before among the old ones."""
    longest = [1400, 700, 30] if window is None else [100, 70, 30]
    shape: Shape = (64, 8, 64, window, 16, [(n, 4) for n in longest])
    problem = make_heads(shape, False, PLAIN_HEADS, DEVICE, verify=True)
    spec, batch, transform = problem.spec, problem.batch, problem.transform
    ours, exact = problem.copy_of_kv(), problem.copy_of_kv()
    with fused_up_to(len(longest), spec.head_dim):
        run_fused(PagedAttention(), spec, GPU, problem.qkv, transform, problem.copy_of_kv(), batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run_fused(PagedAttention(), spec, GPU, problem.qkv, transform, ours, batch)
    generator = torch.Generator().manual_seed(5)
    cached = [n - 12 for n in longest]
    for counts in ((4, 1, 3), (1, 4, 4), (2, 2, 0), (4, 4, 4)):
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        batch.query_start.copy_(starts)
        batch.context_lens.copy_(torch.tensor([c + n for c, n in zip(cached, counts, strict=True)]))
        problem.qkv.copy_(torch.randn(problem.qkv.shape, generator=generator) * 2)
        graph.replay()
        places = [(seq, cached[seq] + at) for seq, count in enumerate(counts) for at in range(count)]
        of, positions = torch.tensor(places, device=DEVICE).T.contiguous()
        slots = batch.page_table[of, positions // 16].long() * 16 + positions % 16
        used = problem.qkv[: len(places)]
        q = rope_and_write_kv(used, spec.num_heads, positions, transform.rope, exact, slots, transform.norms)
        check_fused_out(out[: len(places)], attention(q, exact, batch, spec, None))
        cached = [c + min(n, 2) for c, n in zip(cached, counts, strict=True)]  # the drafts after the second fail


def test_splits_fill_the_machine() -> None:
    h200 = hardware.known("h200")
    assert 2 * 132 <= 8 * wanted_splits(8, 4, h200) <= 4 * 132
    assert wanted_splits(100000, 4, h200) == 1


def test_every_tile_fits_every_card() -> None:
    for gpu in hardware.KNOWN.values():
        for case in attention_tiles.cases():
            tile = attention_tiles.choose(case, gpu)
            assert tile.shared_bytes(case) <= gpu.shared_per_block
