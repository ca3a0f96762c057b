"""A draft head whose target is split over ranks drafts what it drafts on one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor

from microscale.engine.config import EngineConfig
from microscale.engine.loading.prepare import prepare
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.explain.report import Question, explain
from microscale.models import embedded
from microscale.models.batch import ForwardBatch, LogitRows
from microscale.models.config import OWN_FORMATS, HeadFormats
from microscale.models.draft_heads.config import Eagle3Config, HeadConfig, SeparateHeadConfig
from microscale.models.draft_heads.drafting import TargetEnds, Verified, likeliest_of_ranks
from microscale.models.draft_heads.heads import bind_head, open_head_weights
from microscale.models.draft_heads.layer import FULL
from microscale.models.draft_heads.weights import CheckpointHead, DummyHead
from microscale.models.dummy_weights import RandomTensors
from microscale.parallel.sharding import Shard, split_vocabulary
from microscale.planning.ops import AttentionBatch, Logits, Ops
from microscale.planning.ranks import summarise
from microscale_lab.heads import ops_for_head
from support.demo_prompts import demo_model
from support.heads import bound, random_config
from support.thread_ranks import ThreadRank, run_ranks

EAGLE3 = SpeculativeConfig("eagle3", 3)
DEMO = EngineConfig("demo", device="cpu", speculative=EAGLE3)
PAGES = 4


def part_of(config: SeparateHeadConfig, shard: Shard, make: RandomTensors) -> Any:
    """One rank's random head: its rows of the whole one's lm_head, where it has one of its own."""
    whole = DummyHead(config, make)
    rows, tensors = split_vocabulary(config.reads.vocab_size, shard), whole.tensors
    weights = DummyHead(replace(config, shard=shard), make)

    def own(device: torch.device) -> Any:
        found = tensors(device)
        lm_head = getattr(found, "lm_head", None)
        return found if lm_head is None else replace(found, lm_head=lm_head[rows.start : rows.stop])

    weights.tensors = own  # type: ignore[method-assign]
    return weights


def verified_rows(config: HeadConfig, seed: int) -> Verified:
    """The rows of a prompt of five tokens, of chance, whose next tokens are wanted."""
    generator, rows = torch.Generator().manual_seed(seed), 5
    tapped = torch.randn((rows, config.reads.width), generator=generator)
    tokens = torch.randint(config.reads.vocab_size, (rows,), generator=generator)
    starts, lens = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [rows]))
    queries = AttentionBatch(starts, lens, torch.arange(PAGES, dtype=torch.int32)[None], 1)
    positions = torch.arange(rows)
    last = LogitRows(torch.tensor([rows - 1]), {FULL: queries})
    return Verified(ForwardBatch(tokens, positions, {FULL: queries}, {FULL: positions}, last), tapped)


@pytest.mark.parametrize("formats", [OWN_FORMATS, HeadFormats("mxfp8")], ids=["own", "mxfp8"])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3 with its own lm_head", "dflash"])
def test_ranks_guess_what_one_rank_guesses(kind: str, formats: HeadFormats) -> None:
    """Three ranks, each with some rows of lm_head, its own or the target's."""
    model = demo_model()
    config = random_config(kind.split()[0], model)
    if kind.endswith("own lm_head") and isinstance(config, Eagle3Config):
        config = replace(config, own_lm_head=True)

    class Large(RandomTensors):
        def normal(self, *args: object, **options: object) -> Tensor:
            drawn = super().normal(*args, **options)  # type: ignore[arg-type]
            return drawn * 8 if drawn.ndim == 2 else drawn

    steps = [verified_rows(config, seed) for seed in range(4)]
    whole = bound(DummyHead(config, Large(5)), model, formats)
    wanted = [whole.draft(step, whole.new_cache(PAGES), 4).tolist() for step in steps]

    def work(ranks: ThreadRank, rank: int) -> list[Any]:
        shard = Shard(rank, ranks.world)
        ops = ops_for_head(Ops(model.ops.gpu, model.ops.activations, model.ops.preference, ranks=ranks), formats)
        own = split_vocabulary(model.config.vocab_size, shard)

        class Rows:
            """The rank's rows of the target's lm_head."""

            def logits(self, x: Tensor) -> Logits:
                return summarise(model.lm_head.logits(x).values[:, own.start : own.stop].contiguous())

        ends = TargetEnds(model.embed, Rows())  # type: ignore[arg-type]
        head = bind_head(part_of(config, shard, Large(5)), ops, model.device, model.page_size, ends)
        return [head.draft(step, head.new_cache(PAGES), 4).tolist() for step in steps]

    assert run_ranks(3, work) == [wanted] * 3
    # Not one rank's rows alone, and not one token alone.
    found = {token for draft in wanted for token in draft[0]}
    assert len({token // (model.config.vocab_size // 3) for token in found}) > 1


@pytest.mark.parametrize("largest", ["first", "last", "tie", "all the same"])
def test_the_likeliest_of_ranks_is_the_lowest_of_equals(largest: str) -> None:
    config = random_config("dflash", demo_model())
    vocab = config.reads.vocab_size
    logits = torch.zeros((2, vocab))
    at = {"first": [0], "last": [vocab - 1], "tie": [700, vocab - 2], "all the same": []}[largest]
    logits[:, at] = 7.5

    def work(ranks: ThreadRank, rank: int) -> list[int]:
        shard = Shard(rank, ranks.world)
        own = split_vocabulary(vocab, shard)
        part = summarise(logits[:, own.start : own.stop].contiguous())
        return likeliest_of_ranks(part, replace(config, shard=shard), ranks).tolist()

    assert run_ranks(4, work) == [[(at or [0])[0]] * 2] * 4


def test_a_rank_reads_its_rows_of_the_lm_head_alone() -> None:
    model = demo_model()
    device = torch.device("cpu")

    def opened(shard: Shard) -> CheckpointHead:
        weights = open_head_weights(str(embedded.DRAFT_HEAD), model.config.sharded(shard))
        assert isinstance(weights, CheckpointHead)
        return weights

    whole = opened(Shard()).tensors(device)
    assert whole.lm_head is not None
    for rank in range(2):
        weights = opened(Shard(rank, 2))
        rows, tensors = weights.config.own_rows, weights.tensors(device)
        assert tensors.lm_head is not None
        assert torch.equal(tensors.lm_head, whole.lm_head[rows.start : rows.stop])
        assert isinstance(tensors.fc, Tensor)
        assert isinstance(whole.fc, Tensor)
        assert torch.equal(tensors.fc, whole.fc)
        read = [entry.end - entry.begin for entry in weights.entries if "lm_head" in entry.name]
        assert sum(read) == len(rows) * whole.fc.shape[0] * 2


def test_ranks_must_have_one_draft_head() -> None:
    same = [prepare(structs.replace(DEMO, shard=Shard(rank, 2))).fingerprint()["draft head"] for rank in range(2)]
    assert same[0] == same[1]
    without = prepare(structs.replace(DEMO, speculative=None)).fingerprint()
    assert "draft head" not in without
    narrow = prepare(structs.replace(DEMO, speculative=replace(EAGLE3, quantization="mxfp8"))).fingerprint()
    own = prepare(DEMO).fingerprint()
    assert {key for key in own if own[key] != narrow[key]} == {"draft head's formats"}


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_explain_says_what_drafts_cost_a_rank(drafter: str) -> None:
    one, two = (
        explain(Question("gpt-oss-120b", "h200", speculative=drafter, tensor_parallel_size=ranks)) for ranks in (1, 2)
    )
    assert one.drafts is not None
    assert two.drafts is not None
    # A rank computes half of most layers, with drafts and without.
    for whole, half in zip(one.drafts.batches[0].steps, two.drafts.batches[0].steps, strict=True):
        assert 0.4 * whole.us < half.us < whole.us
    held = [report.memory.by_kind().get("draft_head", 0) for report in (one, two)]
    if drafter == "ngram":
        assert held == [0, 0]
    else:
        assert held[0] // 2 < held[1] < held[0]
    assert not two.drafts.published
