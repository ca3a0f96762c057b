"""Paths: which of an implementation's ways runs a batch, why not the others, and that the oracle is asked once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from microscale.errors import Unsupported
from microscale.formats import MXFP8, encode
from microscale.hardware import KNOWN, REPRESENTATIVES, Gpu, cpu, known
from microscale.hardware.tiles.thresholds import ThresholdName, threshold
from microscale.kernels.launch import recording
from microscale.kernels.moe.packed import PackedExperts
from microscale.kernels.moe.paths import BF16_PATHS, MXFP8_PATHS
from microscale.kernels.moe.spec import MoePath
from microscale.kernels.op import Path, Reason, always
from microscale.models.families import PRESETS
from microscale.models.outline import outline
from microscale.models.recorded import samplings
from microscale.planning import paths, registry
from microscale.planning.decision import Rejected
from microscale.planning.ops import (
    Activations,
    AttentionBatch,
    AttentionSpec,
    Dense,
    DenseWeights,
    Gate,
    GateKind,
    Logits,
    MoeSpec,
    Ops,
    PagedKv,
    Preference,
    RopeTable,
    Routing,
    SamplingSpec,
    SmallSpec,
)
from microscale.planning.paths import PathList, ask, path_for, pick, spans
from microscale.planning.plan import Setup, make_plan
from microscale.planning.precision import PRECISIONS
from microscale_lab.calls import run_sampling
from microscale_lab.predict.measured_as import path_name

H200 = known("h200")
HEADS = AttentionSpec(8, 2, 64, None, False, 16, Activations.BF16, tokens=1, context=4096)
MODELS = ("gpt-oss-20b", "gpt-oss-120b", "gemma-4-26b-a4b")
FUSED = ("with its norm", "summed by the next norm", "with a dense MLP", "from the projection")
"""Forms that need no path: the model takes the ops apart."""


def at_most(most: int) -> Any:
    def supports(spec: MoeSpec, gpu: Gpu) -> Reason | None:
        return None if spec.tokens <= most else f"runs up to {most} tokens, not {spec.tokens}"

    return supports


FEW = Path("few", "it reads less", at_most(4))
SOME = Path("some", "it fills the card", at_most(40))
MANY = Path("many", "it is the last", always)


def moe(tokens: int) -> MoeSpec:
    gate = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
    return MoeSpec(32, 4, 2880, 2880, "mxfp4", Activations.BF16, gate, True, tokens)


def test_the_first_that_supports_a_spec_runs_it_and_each_other_has_its_reason() -> None:
    order = (FEW, SOME, MANY)
    assert pick(order, moe(4), H200).path is FEW
    found = pick(order, moe(5), H200)
    assert found.path is SOME
    assert found.rejected == (
        Rejected("few", "runs up to 4 tokens, not 5"),
        Rejected("many", "some goes first: it fills the card"),
    )
    assert path_for(order, moe(41), H200) is MANY
    with pytest.raises(Unsupported, match="few runs up to 4 tokens, not 41; some runs up to 40 tokens, not 41"):
        path_for(order[:2], moe(41), H200)
    assert pick(order[:2], moe(41), H200).refusal == "runs up to 4 tokens, not 41"


def test_spans_find_the_very_size_at_which_the_path_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the sizes that are asked one by one, and with a size of one in between."""
    entry = registry.moe("triton_w4a16")
    only: Path[MoeSpec] = Path("only", "it is odd", lambda spec, gpu: None if spec.tokens == 77 else "runs 77 tokens")
    most = Path("most", "it reads less", at_most(5001))
    monkeypatch.setattr(entry, "paths", (only, most, MANY))
    found = [span for span in spans(entry, "experts", replace(moe(1), hidden=64), H200, 1, 8192) if not span.form]
    assert [(s.first, s.last, s.path) for s in found] == [
        (1, 76, "most"),
        (77, 77, "only"),
        (78, 5001, "most"),
        (5002, 8192, "many"),
    ]


@pytest.mark.parametrize("card", REPRESENTATIVES)
def test_every_batch_of_every_model_has_a_path(card: str) -> None:
    """On every card, in every precision, at every size; where no fused form runs, it says why."""
    for model in MODELS:
        shape = outline(model, PRESETS[model], Activations.BF16, 16, 4096)
        for precision in PRECISIONS.values():
            plan = make_plan(model, shape.uses, Setup(KNOWN[card], Activations.BF16, precision=precision))
            for decision in plan.decisions.values():
                for span in decision.path_spans:
                    fused = span.form.endswith(FUSED)
                    assert span.path is not None or fused, (model, decision.layer, span)
                    assert all(entry.reason for entry in span.rejected)
                    assert span.path is not None or span.rejected
                sizes = [s for s in decision.path_spans if not s.form]
                assert all(one.last + 1 == two.first for one, two in pairwise(sizes))
                assert not sizes or sizes[-1].last == decision.tokens


@pytest.mark.parametrize("card", REPRESENTATIVES)
def test_the_next_norm_sums_what_the_list_would(card: str) -> None:
    """Where the sum is left to the norm, the list runs anyway; and wherever it runs up to the threshold, it is left."""
    most = threshold(ThresholdName.SUM_IN_NORM_TOKENS, KNOWN[card])
    for model in MODELS:
        shape = outline(model, PRESETS[model], Activations.BF16, 16, 4096)
        for precision in PRECISIONS.values():
            plan = make_plan(model, shape.uses, Setup(KNOWN[card], Activations.BF16, precision=precision))
            for decision in plan.decisions.values():
                if decision.op == "moe":
                    entry = registry.moe(decision.chosen)
                    for tokens in range(66):
                        spec = replace(decision.spec, tokens=tokens)
                        runs = path_for(entry.paths, spec, KNOWN[card]).name
                        listed = runs.startswith(("small batch, list", "small batch, own list")) and tokens <= most
                        left = ask(entry, PathList.PARTS, spec, KNOWN[card]).path
                        name = None if left is None else left.name
                        assert name == (runs.removesuffix(", bf16") if listed else None), (model, tokens)


# ---- bound layers ----------------------------------------------------------------------------------------------------


def attention_batch(sequences: int, longest: int = 1, pages: int = 4) -> AttentionBatch:
    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device="meta")

    return AttentionBatch(ints(sequences + 1), ints(sequences), ints(sequences, pages), longest)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


KV = PagedKv(meta(8, 2, 16, 64), meta(8, 2, 16, 64))


def test_the_oracle_is_asked_once_for_all_layers_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    first_path = paths.first_path

    def counting(order: Any, spec: Any, gpu: Gpu) -> Any:
        asked.append(spec)
        return first_path(order, spec, gpu)

    ops = Ops(H200, Activations.BF16, Preference())
    layers = [ops.attention("full_attention", HEADS, None) for _ in range(3)]
    dense = [ops.dense("qkv", DenseWeights(meta(512, 256))) for _ in range(2)]
    monkeypatch.setattr(paths, "first_path", counting)
    with recording():
        for _ in range(2):
            for layer in layers:
                layer(meta(3, 8, 64), KV, attention_batch(3))
            for one in dense:
                one(meta(3, 256))
    assert len(asked) == 2
    with recording():
        layers[0](meta(3, 8, 64), KV, attention_batch(1, longest=3))
    assert len(asked) == 3


def test_a_fused_form_says_before_it_is_called_why_it_cannot_run() -> None:
    attention = Ops(H200, Activations.BF16, Preference()).attention("full_attention", HEADS, None)
    rope = RopeTable(torch.empty(32, device="meta"), 1.0)
    few, many = attention_batch(2), attention_batch(9)
    assert attention.why_not_fused_heads(meta(2, 12, 64), None, KV, few) is None
    with recording() as found:
        attention.from_heads(meta(2, 12, 64), rope, None, KV, few)
    assert [kernel.short_name for kernel in found] == ["attend_fused"]
    drafts = replace(attention_batch(2, longest=4), verify=True)
    assert attention.why_not_fused_heads(meta(5, 12, 64), None, KV, drafts) is None
    with recording() as found:
        attention.from_heads(meta(5, 12, 64), rope, None, KV, drafts)
    assert [kernel.short_name for kernel in found] == ["attend_verify"]
    reason = attention.why_not_fused_heads(meta(9, 12, 64), None, KV, many)
    assert reason == "triton_paged pays up to 8 sequences, not 9"
    with pytest.raises(Unsupported, match="pays up to 8 sequences, not 9; check why_not_fused_heads first"):
        attention.from_heads(meta(9, 12, 64), rope, None, KV, many)
    plain = Ops(H200, Activations.BF16, Preference("reference")).attention("full_attention", HEADS, None)
    assert plain.why_not_fused_heads(meta(2, 12, 64), None, KV, few) == "reference has no such form"


def test_a_layer_takes_the_norm_before_it_or_says_why_not() -> None:
    ops = Ops(H200, Activations.BF16, Preference())
    weights = DenseWeights(meta(512, 256))
    layer = ops.dense("qkv", weights, behind_sum=True)
    assert layer.why_not_fused_norm(1) is None
    with recording() as found:
        y, total = layer.from_sum(meta(1, 256), meta(1, 256), meta(256), 1e-5)
    assert [kernel.short_name for kernel in found] == ["small_batch_from_sum"]
    assert (y.shape, total.shape) == ((1, 512), (1, 256))
    assert layer.why_not_fused_norm(2) == "triton_bf16 norms one token, not 2"
    with pytest.raises(Unsupported, match="norms one token, not 2; check why_not_fused_norm first"):
        layer.from_sum(meta(2, 256), meta(2, 256), meta(256), 1e-5)
    assert ops.dense("o", weights).why_not_fused_norm(1) == "triton_bf16 is for layers behind a sum"
    plain = Ops(H200, Activations.BF16, Preference("reference")).dense("qkv", weights, behind_sum=True)
    assert plain.why_not_fused_norm(1) == "reference has no such form"
    with pytest.raises(Unsupported, match="of qkv, behind_sum is False and the plan has True"):
        ops.dense("qkv", weights)


def test_experts_say_why_an_mlp_does_not_run_with_them() -> None:
    ops = Ops(H200, Activations.BF16, Preference())
    gate_up, down = (encode(torch.zeros(4, *shape), MXFP8) for shape in ((256, 256), (256, 128)))
    layer = ops.experts("experts", gate_up, down, 2, Gate(GateKind.GELU_TANH, interleaved=False))
    assert layer.why_not_mlp(1) == "no MLP was bound to the experts"

    def mlp(name: str, fmt: str) -> tuple[Dense, Dense]:
        first, second = torch.zeros(512, 256), torch.zeros(256, 256)
        if fmt == "bf16":
            weights = DenseWeights(first.bfloat16()), DenseWeights(second.bfloat16())
        else:
            weights = DenseWeights(encode(first, MXFP8)), DenseWeights(encode(second, MXFP8))
        return ops.dense(f"mlp.gate_up{name}", weights[0]), ops.dense(f"mlp.down{name}", weights[1])

    layer.bind_mlp(*mlp("", "mxfp8"))
    assert layer.why_not_mlp(1) is None
    assert layer.why_not_mlp(3) == "triton_w8a16 runs up to 2 tokens with an MLP, not 3"
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(Unsupported, match="up to 2 tokens with an MLP, not 3; check why_not_mlp first"):
        layer.with_mlp(torch.zeros(2, 3, 256), Routing(ids, ids.float()))
    with pytest.raises(Unsupported, match="An MLP next to experts of 256 columns cannot be"):
        layer.bind_mlp(*reversed(mlp("", "mxfp8")))
    layer.bind_mlp(*mlp(".wide", "bf16"))
    assert layer.why_not_mlp(1) == "triton_w8a16 takes an mxfp8 MLP without biases, not bf16, held unpacked"


def test_experts_leave_the_sum_or_say_why_not() -> None:
    ops = Ops(H200, Activations.BF16, Preference())
    gate_up, down = (encode(torch.zeros(4, *shape), MXFP8) for shape in ((256, 256), (256, 128)))
    layer = ops.experts("experts", gate_up, down, 2, Gate(GateKind.SILU, interleaved=False))
    ids = torch.zeros(3, 2, dtype=torch.int32)
    with recording() as found:
        parts = layer.parts(torch.zeros(3, 256).bfloat16(), Routing(ids, ids.float()))
    assert [kernel.short_name for kernel in found] == ["gate_up_small", "down_small"]
    assert (parts.rows.shape, parts.rows.dtype, parts.top_k) == ((6, 256), torch.float32, 2)
    with recording() as found:
        layer(torch.zeros(3, 256).bfloat16(), Routing(ids, ids.float()))
    assert [kernel.short_name for kernel in found][-1] == "combine"
    fewer = "triton_w8a16 pays from 3 tokens on, not for 2: fewer are added up in the last GEMM"
    assert layer.why_not_parts(2) == fewer
    assert layer.why_not_parts(65) == "triton_w8a16 pays up to 64 tokens, not for 65"
    with pytest.raises(Unsupported, match=r"pays from 3 tokens on, not for 2.*; check why_not_parts first"):
        layer.parts(torch.zeros(2, 256).bfloat16(), Routing(ids[:2], ids[:2].float()))
    with pytest.raises(Unsupported, match="reads rows of bfloat16"):
        layer.parts(torch.zeros(3, 256), Routing(ids, ids.float()))
    plain = Ops(cpu(), Activations.BF16, Preference("reference"))
    on_cpu = plain.experts("experts", gate_up, down, 2, Gate(GateKind.SILU, interleaved=False))
    assert on_cpu.why_not_parts(3) == "reference has no such form"


# ---- a plan is of the model that binds it ----------------------------------------------------------------------------


def test_a_plan_for_other_layers_is_refused_for_every_op() -> None:
    ops = Ops(cpu(), Activations.FLOAT32, Preference())
    heads = replace(HEADS, activations=Activations.FLOAT32)
    small = SmallSpec(64, 8, 2, 64, 4, 2, Activations.FLOAT32, tokens=1)
    ops.attention("full_attention", heads, None)
    ops.small(small)
    ops.dense("o", DenseWeights(torch.zeros(8, 32)))
    ops.sampling(100)
    other = Ops(cpu(), Activations.FLOAT32, Preference(), plan=ops.plan)
    # The context that was reckoned with is the plan's own.
    other.attention("full_attention", replace(heads, context=8), None)
    other.small(small)
    with pytest.raises(Unsupported, match=r"of full_attention, scale is 1\.0 and the plan has None"):
        other.attention("full_attention", replace(heads, scale=1.0), None)
    with pytest.raises(Unsupported, match="of small, num_experts is 8 and the plan has 4"):
        other.small(replace(small, num_experts=8))
    with pytest.raises(Unsupported, match="of o, rows is 16 and the plan has 8; bias is True and the plan has False"):
        other.dense("o", DenseWeights(torch.zeros(16, 32), torch.zeros(16)))
    with pytest.raises(Unsupported, match="of sampling, vocab is 101 and the plan has 100"):
        other.sampling(101)


# ---- sampling: what requests ask for ---------------------------------------------------------------------------------

KERNELS = {"scan", "add_bias", "narrow", "collect", "settle", "weigh", "pick", "top_blocks", "top_merge"}


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_every_sampling_batch_has_one_path_and_starts_just_its_stages(rows: int, blocks: bool) -> None:
    entry, vocab = registry.sampling("triton_sampling"), 9000
    values, none = (torch.empty(rows, width, device="meta") for width in (vocab, 71))
    given = Logits(values, none, none.int(), none, 128) if blocks else None
    seen = set()
    for batch in samplings(rows, vocab):
        features = batch.features(given)
        picked = pick(entry.paths, SamplingSpec(vocab, rows, features), H200)
        assert picked.path is not None
        assert len(picked.rejected) == len(entry.paths) - 1
        with recording() as found:
            run_sampling(entry, H200, values, batch, given)
        started = {kernel.short_name for kernel in found}
        plain = not (features.draws or features.adjusts or features.tops)
        wanted = {"pick"} if blocks and plain else {"pick", "scan"}
        wanted |= {"weigh"} if features.draws else set()
        wanted |= {"narrow", "collect", "settle"} if features.filters else set()
        wanted |= {"add_bias"} if features.biases else set()
        wanted |= {"top_blocks", "top_merge"} if features.tops else set()
        assert started == wanted <= KERNELS, picked.path.name
        seen.add(picked.path.name)
    assert len(seen) == len(entry.paths) - 1  # all but that with, or without, the lm_head's blocks


def test_a_plan_names_the_paths_of_sampling() -> None:
    uses = outline("gpt-oss-20b", PRESETS["gpt-oss-20b"], Activations.BF16, 16, 4096).uses
    plan = make_plan("gpt-oss-20b", uses, Setup(H200, Activations.BF16))
    named = {span["form"]: span["path"] for span in plan.of("sampling", "sampling")[-1].to_json()["paths"]}
    assert named == {
        "greedy": "greedy, lm_head's blocks",
        "temperature": "draw",
        "top-k or top-p": "filtered draw",
        "with a bias": "filtered draw, adjusted, biased",
        "a prompt's tokens": "given tokens",
    }


@pytest.mark.parametrize("order", [BF16_PATHS, MXFP8_PATHS], ids=["bf16", "mxfp8"])
def test_a_path_is_timed_as_one_of_the_same_implementation(order: tuple[MoePath[PackedExperts], ...]) -> None:
    timed = {path.timed_as for path in order if path.timed_as is not None}
    assert timed
    assert timed <= {path.name for path in order}


def test_own_lists_are_predicted_from_the_rows_of_lists() -> None:
    """They are the same GEMMs; the rows of few tokens were measured with a launch more."""
    for entry, name in (("triton_w4a16", "small batch, list"), ("triton_w4a8", "small batch, list, bf16")):
        activations = Activations.BF16 if entry == "triton_w4a16" else Activations.MXFP8
        names = {
            path_name(registry.moe(entry), "experts", replace(moe(tokens), activations=activations), H200)
            for tokens in (3, 8, 9)
        }
        assert names == {name}
