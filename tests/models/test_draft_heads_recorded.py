"""What a draft head is recorded to start is what it starts, at any size; and it binds what it is outlined to bind."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from microscale import hardware
from microscale.hardware import known
from microscale.models.draft_heads.config_file import open_draft_head
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds, Verified
from microscale.models.draft_heads.heads import bind_head, bind_head_shapes, outline_head, record_head
from microscale.models.dummy_weights import META
from microscale.models.recorded import Step
from microscale.planning.ops import Activations, DenseWeights, Kernel, Launch, Ops, Preference, recording
from microscale_lab.heads import ops_for_head
from microscale_lab.prove import inventory
from support.listed import assert_listed
from support.tiny_heads import HEADS as TINY
from support.tiny_heads import TARGET

CONTEXT = 1 << 17
HEADS = ["gpt-oss-20b-eagle3", "gpt-oss-120b-eagle3-v3", "dflash-tiny", "qwen3.6-35b-a3b-mtp"]


@cache
def bound(card: str, name: str) -> tuple[DraftHead, dict[Kernel, Launch]]:
    ops = ops_for_head(Ops(known(card), Activations.BF16, Preference()))
    head = bind_head_shapes(inventory.heads()[name], ops)
    return head, record_head(head, CONTEXT)


@st.composite
def verified_steps(draw: st.DrawFn) -> Step:
    """Steps of a target: one row or a few of each sequence, or prompts; one row of some sequences is the last."""
    sequences = draw(st.integers(1, 70))
    longest = draw(st.integers(1, 8) | st.integers(1, 4000))
    tokens = draw(st.integers(sequences + longest - 1, sequences * longest))
    return Step(tokens, sequences, longest, draw(st.integers(1, CONTEXT // 16)), draw(st.integers(0, sequences)))


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=15)
@given(step=verified_steps(), count=st.integers(0, 7))
def test_no_size_starts_a_kernel_that_is_not_listed(name: str, step: Step, count: int) -> None:
    head, listed = bound("h200", name)
    tapped = torch.empty((step.tokens, head.config.reads.width), dtype=torch.bfloat16, device=META)
    with recording() as started:
        head.draft(Verified(step.batch(), tapped), head.new_cache(4), count)
    assert started
    assert_listed(started, listed)


@pytest.mark.slow
def test_prove_lists_a_head_where_it_is_asked_for() -> None:
    gpu = known("gb10")
    found = inventory.recorded(gpu, ["gpt-oss-20b-eagle3"])
    _, exact = bound("gb10", "gpt-oss-20b-eagle3")
    assert exact.keys() <= found.keys()
    assert {tuple(users) for users in found.values()} == {("gpt-oss-20b-eagle3",)}
    # lm_head in MXFP8 and keys in FP8 are kernels of their own.
    assert len(found) > len(exact)


@pytest.mark.parametrize("name", ["specforge", "nvidia_v3", "speculators", "speculators_qwen3", "dflash"])
def test_the_outline_is_what_is_loaded(tmp_path: Path, name: str) -> None:
    """Its bytes are the file's, its uses are the bound head's, its cache is as large as it says."""
    published = TINY[name]
    weights = open_draft_head(published.write(tmp_path), TARGET)
    found = outline_head(weights.config, Activations.FLOAT32, 16)
    read = [tensor for key, tensor in published.tensors.items() if key != "t2d"]
    assert found.weight_bytes == sum(tensor.nbytes for tensor in read)
    ops = Ops(hardware.cpu(), Activations.FLOAT32, Preference())
    table = torch.zeros(TARGET.vocab_size, TARGET.hidden, dtype=torch.bfloat16)
    shared = Ops(hardware.cpu(), Activations.FLOAT32, Preference())
    ends = TargetEnds(shared.embed(table), shared.dense("lm_head", DenseWeights(table)))
    head = bind_head(weights, ops, torch.device("cpu"), 16, ends)
    planned = {(use.op, use.layer) for use in found.uses}
    assert planned == {(decision.op, decision.layer) for decision in ops.plan.decisions.values()}
    cache = head.new_cache(3)
    assert len(cache.layers) == found.num_layers
    assert sum(kv.k.numel() + kv.v.numel() for kv in cache.layers) == 3 * 16 * found.cached_numbers
