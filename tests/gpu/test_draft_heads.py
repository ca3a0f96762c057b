"""Draft heads of published widths on a real GPU: the chosen kernels against float32 references there, eager and from a
captured graph; and taps, which must change no bit of the target's logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.hardware import detect
from microscale.models.batch import ForwardBatch
from microscale.models.config import OWN_FORMATS, PAGED, HeadFormats, LayerKind
from microscale.models.draft_heads.config import PRESETS, DFlashConfig
from microscale.models.draft_heads.dflash import DFlash
from microscale.models.draft_heads.drafting import TargetEnds, Verified
from microscale.models.draft_heads.eagle3 import Eagle3
from microscale.models.draft_heads.heads import bind_head
from microscale.models.draft_heads.layer import Steps
from microscale.models.draft_heads.weights import DummyHead
from microscale.models.dummy_weights import RandomTensors
from microscale.models.taps import Taps
from microscale.planning.ops import Activations, DenseWeights, Ops, Preference
from microscale.planning.precision import make_precision
from microscale_lab.batches import SequenceChunk, build_batch
from support.families import load_gpt_oss
from support.model_noise import model_noise

NAME = "gpt-oss-20b-eagle3"
CUDA = torch.device("cuda")
PAGE_SIZE, PAGES = 16, 40
FULL = LayerKind.FULL
SHAPE = {"num_hidden_layers": 4, "num_local_experts": 16, "vocab_size": 4096}


def bound(activations: Activations, preference: Preference, formats: HeadFormats = OWN_FORMATS) -> Eagle3:
    config = PRESETS[NAME]
    ops = Ops(detect(), activations, preference, make_precision().of_draft_head(formats.quantization, formats.lm_head))
    table = RandomTensors().normal("embed", (config.reads.vocab_size, config.reads.target_hidden), CUDA, std=1.0)
    ends = TargetEnds(ops.embed(table), ops.dense("lm_head.target", DenseWeights(table[:32])))
    head = bind_head(DummyHead(config, RandomTensors(3)), ops, CUDA, PAGE_SIZE, ends)
    assert isinstance(head, Eagle3)
    return head


def rows(lengths: list[int], first: int = 0) -> tuple[ForwardBatch, Tensor]:
    """Rows of several sequences, the last of each to be guessed after, and what was tapped there."""
    draws = torch.Generator().manual_seed(sum(lengths))
    chunks = []
    for i, length in enumerate(lengths):
        tokens = torch.randint(0, 200_000, (length,), generator=draws).tolist()
        chunks.append(
            SequenceChunk(tokens, first, dict.fromkeys(LayerKind, range(i, PAGES * len(lengths), len(lengths))), 1)
        )
    tapped = torch.randn(sum(lengths), PRESETS[NAME].reads.width, generator=draws)
    return build_batch(chunks, PAGE_SIZE, CUDA), tapped.to(CUDA, torch.bfloat16)


def chain(head: Eagle3, batch: ForwardBatch, tapped: Tensor, tokens: list[Tensor]) -> list[Tensor]:
    """The logits of a chain of guesses. ``tokens``: what stands in the place of each guess."""
    kv = head.new_cache(PAGES * 8)
    last = Verified(batch, tapped).last.attention[FULL]
    logits, hidden = head.forward(batch, kv, head.combine(tapped.to(head.ops.dtype)))
    found = [logits.values]
    steps = Steps(last, len(tokens), PAGE_SIZE)
    for step, ids in enumerate(tokens):
        logits, hidden = head.forward(steps.batch(step, ids), kv, hidden)
        found.append(logits.values)
    return found


@pytest.mark.drafts(NAME)
@pytest.mark.parametrize("lengths", [[1], [4], [300, 3, 17], [1] * 8], ids=str)
@pytest.mark.parametrize("formats", [OWN_FORMATS, HeadFormats(lm_head="mxfp8"), HeadFormats("mxfp8")], ids=str)
def test_fast_kernels_give_the_references_logits(lengths: list[int], formats: HeadFormats) -> None:
    """Over a chain of four guesses, each after the same tokens."""
    batch, tapped = rows(lengths)
    tokens = [torch.randint(0, 200_000, (len(lengths),), device=CUDA) for _ in range(3)]
    truth = chain(bound(Activations.FLOAT32, Preference("reference"), formats), batch, tapped, tokens)
    fast = chain(bound(Activations.BF16, Preference(), formats), batch, tapped, tokens)
    for step, (mine, theirs) in enumerate(zip(fast, truth, strict=True), 1):
        rms = float((mine - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())
        assert rms <= 2 * model_noise(step + 1), f"guess {step} is off by {rms}"


@pytest.mark.drafts(NAME)
@pytest.mark.parametrize("lengths", [[1], [4, 2, 4], [1] * 8], ids=str)
def test_a_captured_graph_drafts_the_same_tokens(lengths: list[int]) -> None:
    head = bound(Activations.BF16, Preference())
    kv = head.new_cache(PAGES * 8)
    verified = Verified(*rows(lengths))
    eager = head.draft(verified, kv, 4).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = head.draft(verified, kv, 4)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)
    # Other rows in the same place.
    batch, tapped = rows(lengths, first=5)
    for standing, other in ((verified.batch.token_ids, batch.token_ids), (verified.tapped, tapped)):
        standing.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, head.draft(verified, kv, 4))


@pytest.mark.drafts("dflash-tiny")
@pytest.mark.parametrize("lengths", [[1], [300, 3, 17], [1] * 8], ids=str)
def test_a_block_is_guessed_as_by_the_references(lengths: list[int]) -> None:
    """Its logits, and the same guesses from a captured graph."""
    config = PRESETS["dflash-tiny"]
    assert isinstance(config, DFlashConfig)
    found = []
    for activations, preference in ((Activations.FLOAT32, Preference("reference")), (Activations.BF16, Preference())):
        ops = Ops(detect(), activations, preference)
        table = RandomTensors().normal("embed", (config.reads.vocab_size, config.layer.hidden), CUDA, std=1.0)
        # As wide as the head's own list has it: see ``bind_head_shapes``.
        ends = TargetEnds(
            ops.embed(table), Ops(detect(), activations, preference).dense("lm_head", DenseWeights(table))
        )
        head = bind_head(DummyHead(config, RandomTensors(3)), ops, CUDA, PAGE_SIZE, ends)
        assert isinstance(head, DFlash)
        batch, _ = rows(lengths)
        batch = replace(batch, token_ids=batch.token_ids % config.reads.vocab_size)
        tapped = torch.randn(sum(lengths), config.reads.width, generator=torch.Generator().manual_seed(1))
        verified, kv = Verified(batch, tapped.to(CUDA, ops.dtype)), head.new_cache(PAGES * 8)
        logits = head.forward(verified, kv, 7)
        assert logits is not None
        found.append(logits.values.clone())
    truth, fast = found
    rms = float((fast - truth).square().mean().sqrt() / truth.square().mean().sqrt())
    assert rms <= 2 * model_noise(config.num_layers + 1)
    eager = head.draft(verified, kv, 7).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = head.draft(verified, kv, 7)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, eager)


@pytest.mark.starts("gpt-oss-20b", SHAPE)
@pytest.mark.parametrize("num_logits", [1, None])
def test_taps_change_no_bit_of_the_logits(num_logits: int | None) -> None:
    options = EngineConfig("gpt-oss-20b", load_format="dummy", device="cuda", dtype="bfloat16", hf_overrides=SHAPE)
    model = load_gpt_oss(options)
    chunks = [
        SequenceChunk(list(range(1, n + 1)), 0, {key: list(range(i, 60, 3)) for key in PAGED}, num_logits or n)
        for i, n in enumerate((200, 3, 17))
    ]
    batch = build_batch(chunks, model.page_size, CUDA)
    plain, tapped = (model.new_cache(dict.fromkeys(LayerKind, 60)) for _ in range(2))
    taps = Taps.empty((1, 2, 4), 220, model.config.hidden, torch.bfloat16, CUDA)
    taps.rows.fill_(torch.nan)
    assert torch.equal(model.forward(batch, plain).values, model.forward(batch, tapped, taps).values)
    assert torch.isfinite(taps.rows).all()
    # What the last tap holds, normed, gives the logits: the same numbers by another way.
    first = replace(batch, logits=None)
    whole = model.forward(first, model.new_cache(dict.fromkeys(LayerKind, 60))).values
    last = taps.rows[:, -model.config.hidden :]
    normed = model.layers[0].small.rms_norm(last.contiguous(), model.norm, model.config.rms_epsilon)
    again = model.lm_head.logits(normed).values
    assert float((whole - again).square().mean().sqrt() / whole.square().mean().sqrt()) <= 0.01
