"""Decisions: who is chosen, why the others are not, and wishes that are met or refused."""

from __future__ import annotations

import json

import pytest
import torch

from microscale import hardware
from microscale.backends import registry
from microscale.backends.decision import Plan
from microscale.backends.ops import BUCKETS, Activations, DenseWeights, Ops, SmallSpec, Wish
from microscale.backends.oracle import decide, decide_layer
from microscale.errors import Unsupported
from microscale.kernels.dense.spec import DenseSpec
from microscale.kernels.moe.spec import Gate, GateKind, MoeSpec

GATE = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
CPU = hardware.cpu()


def moe_spec(tokens: int = 1, weight_format: str = "mxfp4", activations: Activations = Activations.FLOAT32) -> MoeSpec:
    return MoeSpec(32, 4, 2880, 2880, weight_format, activations, GATE, True, tokens)


def test_a_cpu_runs_dequantized_experts_and_says_why_not_the_reference() -> None:
    decision = decide("moe", "experts", moe_spec(), CPU, Wish())
    assert decision.chosen == "dequantized"
    reasons = {r.name: r.reason for r in decision.rejected}
    assert reasons["reference"].startswith("slower: ")
    assert decision.predicted_us > 0


def test_every_other_implementation_has_its_reason() -> None:
    for op, spec in (("moe", moe_spec()), ("dense", DenseSpec(64, 64, "bf16", Activations.FLOAT32, True, 1))):
        decision = decide(op, op, spec, CPU, Wish())
        names = {decision.chosen, *(r.name for r in decision.rejected)}
        assert names == {entry.name for entry in registry.of_op(op)}
        assert all(r.reason for r in decision.rejected)


def test_a_wish_is_met() -> None:
    assert decide("moe", "experts", moe_spec(), CPU, Wish(backend="reference")).chosen == "reference"
    assert decide("moe", "experts", moe_spec(), CPU, Wish(moe_backend="reference")).chosen == "reference"
    dense = DenseSpec(64, 64, "bf16", Activations.FLOAT32, True, 1)
    assert decide("dense", "o", dense, CPU, Wish(moe_backend="reference")).chosen == "dequantized"


def test_a_wish_that_cannot_be_met_is_an_error_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="mxfp8 activations"):
        decide("moe", "experts", moe_spec(activations=Activations.MXFP8), CPU, Wish(backend="reference"))
    with pytest.raises(Unsupported, match="Unknown backend 'nonsense'"):
        Ops(CPU, Activations.FLOAT32, Wish(backend="nonsense"))
    with pytest.raises(Unsupported, match="moe has no implementation 'nonsense'"):
        Ops(CPU, Activations.FLOAT32, Wish(moe_backend="nonsense"))


def test_when_nothing_fits_every_reason_is_given() -> None:
    with pytest.raises(Unsupported, match=r"reference reads mxfp4 and mxfp8.*dequantized reads"):
        decide("moe", "experts", moe_spec(weight_format="nvfp4"), CPU, Wish())


def test_all_batch_sizes_of_a_layer_share_one_layout() -> None:
    for gpu in (CPU, *hardware.KNOWN.values()):
        activations = Activations.FLOAT32 if gpu.is_cpu else Activations.BF16
        specs = [moe_spec(tokens, activations=activations) for tokens in BUCKETS]
        decisions = decide_layer("moe", "experts", specs, gpu, Wish())
        assert len({registry.find("moe", d.chosen).layout for d in decisions}) == 1
        assert [d.tokens for d in decisions] == list(BUCKETS)


def test_decide_is_pure() -> None:
    assert decide("moe", "experts", moe_spec(), CPU, Wish()) == decide("moe", "experts", moe_spec(), CPU, Wish())


def test_binding_fills_the_plan_and_what_runs_is_what_it_says() -> None:
    ops = Ops(CPU, Activations.FLOAT32, Wish(backend="reference"))
    layer = ops.dense("o", DenseWeights(torch.randn(8, 32)))
    x = torch.randn(3, 32)
    assert layer(x).shape == (3, 8)
    ops.small(SmallSpec(32, 4, 2, 8, 4, 2, Activations.FLOAT32, tokens=1))
    entries = ops.plan.to_json()
    assert {e["op"] for e in entries} == {"dense", "small"}
    assert {e["chosen"] for e in entries} == {"reference"}
    assert json.loads(json.dumps(entries)) == json.loads(json.dumps(ops.plan.to_json()))


def test_a_plan_keeps_one_decision_per_op_layer_and_size() -> None:
    plan = Plan()
    for _ in range(3):
        plan.add(decide_layer("moe", "experts", [moe_spec(1), moe_spec(64)], CPU, Wish()))
    assert [(d.op, d.tokens) for d in plan.decisions.values()] == [("moe", 1), ("moe", 64)]
