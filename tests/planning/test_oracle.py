"""Decisions: who is chosen, why the others are not, and preferences that are met or refused."""

from __future__ import annotations

import json

import pytest
import torch

from microscale import hardware
from microscale.errors import Unsupported
from microscale.hardware import LAUNCH_US, Gpu, speeds
from microscale.kernels.dense.spec import DenseSpec
from microscale.kernels.moe.spec import Gate, GateKind, MoeSpec
from microscale.kernels.op import Cost, Implementation, Reason
from microscale.planning import registry
from microscale.planning.choose_kernel import WORTH, Freedom, decide, decide_layer
from microscale.planning.decision import Plan
from microscale.planning.ops import BUCKETS, Activations, DenseWeights, Ops, Preference, SmallSpec
from support.measured_rows import measured_us

GATE = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
CPU = hardware.cpu()


def moe_spec(tokens: int = 1, weight_format: str = "mxfp4", activations: Activations = Activations.FLOAT32) -> MoeSpec:
    return MoeSpec(32, 4, 2880, 2880, weight_format, activations, GATE, True, tokens)


def test_a_cpu_runs_dequantized_experts_and_says_why_not_the_reference() -> None:
    decision = decide("moe", "experts", moe_spec(), CPU, Preference())
    assert decision.chosen == "dequantized"
    reasons = {r.name: r.reason for r in decision.rejected}
    assert reasons["reference"].startswith("slower: ")
    assert decision.predicted_us > 0


def test_every_other_implementation_has_its_reason() -> None:
    for op, spec in (("moe", moe_spec()), ("dense", DenseSpec(64, 64, "bf16", Activations.FLOAT32, True, 1))):
        decision = decide(op, op, spec, CPU, Preference())
        names = {decision.chosen, *(r.name for r in decision.rejected)}
        assert names == {entry.name for entry in registry.of_op(op)}
        assert all(r.reason for r in decision.rejected)


def test_a_wish_is_met() -> None:
    assert decide("moe", "experts", moe_spec(), CPU, Preference(backend="reference")).chosen == "reference"
    assert decide("moe", "experts", moe_spec(), CPU, Preference(moe_backend="reference")).chosen == "reference"
    dense = DenseSpec(64, 64, "bf16", Activations.FLOAT32, True, 1)
    assert decide("dense", "o", dense, CPU, Preference(moe_backend="reference")).chosen == "dequantized"


def test_a_wish_that_cannot_be_met_is_an_error_with_the_reason() -> None:
    with pytest.raises(Unsupported, match="mxfp8 activations"):
        decide("moe", "experts", moe_spec(activations=Activations.MXFP8), CPU, Preference(backend="dequantized"))
    with pytest.raises(Unsupported, match="Unknown backend 'nonsense'"):
        Ops(CPU, Activations.FLOAT32, Preference(backend="nonsense"))
    with pytest.raises(Unsupported, match="moe has no implementation 'nonsense'"):
        Ops(CPU, Activations.FLOAT32, Preference(moe_backend="nonsense"))


def test_when_nothing_fits_every_reason_is_given() -> None:
    with pytest.raises(Unsupported, match=r"reference reads mxfp4, mxfp8, nvfp4, fp8_block.*dequantized reads"):
        decide("moe", "experts", moe_spec(weight_format="int4"), CPU, Preference())


def test_all_batch_sizes_of_a_layer_share_one_layout() -> None:
    for gpu in (CPU, *hardware.KNOWN.values()):
        activations = Activations.FLOAT32 if gpu.is_cpu else Activations.BF16
        specs = [moe_spec(tokens, activations=activations) for tokens in BUCKETS]
        decisions = decide_layer("moe", "experts", specs, gpu, Preference())
        assert len({registry.find("moe", d.chosen).layout for d in decisions}) == 1
        assert [d.tokens for d in decisions] == list(BUCKETS)


def test_decide_is_pure() -> None:
    assert decide("moe", "experts", moe_spec(), CPU, Preference()) == decide(
        "moe", "experts", moe_spec(), CPU, Preference()
    )


def test_binding_fills_the_plan_and_what_runs_is_what_it_says() -> None:
    ops = Ops(CPU, Activations.FLOAT32, Preference(backend="reference"))
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
        plan.add(decide_layer("moe", "experts", [moe_spec(1), moe_spec(64)], CPU, Preference()))
    assert [(d.op, d.tokens) for d in plan.decisions.values()] == [("moe", 1), ("moe", 64)]


# ---- made-up implementations: what the rules do, whatever kernels there are -----------------------------------------


class Made(Implementation[DenseSpec]):
    """Takes ``us`` microseconds for a token's worth of bytes; runs what its limits allow."""

    op = "dense"

    def __init__(
        self,
        name: str,
        layout: str,
        us: float,
        most_tokens: int = 1 << 20,
        activations: Activations = Activations.BF16,
        weights: int = 0,
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.layout = layout  # type: ignore[misc]
        self._us, self._most, self._activations, self._weights = us, most_tokens, activations, weights

    def supports(self, spec: DenseSpec, gpu: Gpu) -> Reason | None:
        if spec.activations is not self._activations:
            return f"multiplies with {self._activations} activations, not {spec.activations}"
        return None if spec.tokens <= self._most else f"runs up to {self._most} tokens, not {spec.tokens}"

    def cost(self, spec: DenseSpec, gpu: Gpu) -> Cost:
        return Cost(round((self._us - LAUNCH_US) * gpu.bandwidth_gbs * 1e3), 0, efficiency=1.0)

    def packed_bytes(self, spec: DenseSpec) -> int:
        return self._weights


GPU = hardware.known("rtx5090")
SPECS = [DenseSpec(64, 64, "bf16", Activations.BF16, False, tokens) for tokens in BUCKETS]


def choose(
    monkeypatch: pytest.MonkeyPatch, made: list[Made], freedom: Freedom | None = None
) -> tuple[list[str], list[dict[str, str]]]:
    monkeypatch.setattr(registry, "IMPLEMENTATIONS", tuple(made))
    decisions = decide_layer("dense", "o", SPECS, GPU, Preference(), freedom)
    return [d.chosen for d in decisions], [{r.name: r.reason for r in d.rejected} for d in decisions]


def test_an_implementation_for_few_tokens_runs_those_and_shares_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = Made("few", "packed", 10, most_tokens=16), Made("many", "packed", 20)
    chosen, reasons = choose(monkeypatch, [few, many])
    assert chosen == ["few"] * 3 + ["many"] * 4
    assert reasons[0]["many"] == "slower: 20 µs against 10"
    assert reasons[3]["few"] == "runs up to 16 tokens, not 64"


def test_a_layout_that_cannot_run_every_size_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, reasons = choose(
        monkeypatch, [Made("few", "odd", 1 + LAUNCH_US, most_tokens=16), Made("any", "packed", 20)]
    )
    assert chosen == ["any"] * 7
    assert reasons[0]["few"] == "reads the layout 'odd', and 'packed' is faster over all batch sizes"


def test_quantised_activations_must_earn_it(monkeypatch: pytest.MonkeyPatch) -> None:
    freedom = Freedom((Activations.BF16, Activations.MXFP8))

    def against(us: float) -> tuple[list[str], list[dict[str, str]]]:
        exact = Made("exact", "packed", 100)
        return choose(monkeypatch, [Made("mx", "packed", us, activations=Activations.MXFP8), exact], freedom)

    assert set(against(100 / WORTH - 1)[0]) == {"mx"}
    chosen, reasons = against(100 / WORTH + 1)
    assert set(chosen) == {"exact"}
    assert reasons[0]["mx"] == "no faster with mxfp8 activations: 96.2 µs against 100"
    assert (
        choose(monkeypatch, [Made("mx", "packed", 5, activations=Activations.MXFP8), Made("exact", "packed", 100)])[1][
            0
        ]["mx"]
        == "multiplies with mxfp8 activations, not bf16"
    )


def test_weights_beyond_the_card_are_a_reason_unless_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    large, slow = Made("large", "wide", 10, weights=hardware.GIB), Made("slow", "packed", 500)
    chosen, reasons = choose(monkeypatch, [large, slow], Freedom(copies=36))
    assert set(chosen) == {"slow"}
    assert reasons[0]["large"] == "takes 36 GiB for the weights of 36 layers, NVIDIA GeForce RTX 5090 has 32"
    assert set(choose(monkeypatch, [large], Freedom(copies=36))[0]) == {"large"}


def test_a_measured_efficiency_is_used_and_said() -> None:
    measured = decide("moe", "experts", moe_spec(1, activations=Activations.BF16), hardware.known("h200"), Preference())
    assert (measured.chosen, measured.tuned) == ("triton_w4a16", True)
    assert measured.predicted_us == pytest.approx(measured_us("gpt-oss-120b, 1 tokens"), rel=0.05)
    assert not decide("moe", "experts", moe_spec(1, activations=Activations.BF16), GPU, Preference()).tuned


def test_a_stated_speed_must_beat_a_measured_one_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "efficiency", lambda family, op, name, *work: 1.0 if name == "known" else None)
    chosen, reasons = choose(monkeypatch, [Made("known", "packed", 102.5), Made("hoped", "packed", 90)])
    assert set(chosen) == {"known"}
    assert reasons[0]["hoped"] == "stated 90 µs is too near the measured 100 µs"
    assert set(choose(monkeypatch, [Made("known", "packed", 102.5), Made("hoped", "packed", 70)])[0]) == {"hoped"}


def test_weights_are_not_held_wider_than_their_format_on_a_gpu() -> None:
    """cuBLAS on a decoded copy is faster for large batches, and would double what every token reads and the memory."""
    spec = DenseSpec(5120, 2880, "mxfp8", Activations.BF16, True, 1)
    for decision in decide_layer(
        "dense", "qkv", [spec, DenseSpec(5120, 2880, "mxfp8", Activations.BF16, True, 8192)],
        hardware.known("h200"), Preference(),
    ):  # fmt: skip
        assert decision.chosen == "triton_mxfp8"
        reasons = {r.name: r.reason for r in decision.rejected}
        assert reasons["dequantized"] == "holds the weights in 1.9 times the bytes of triton_mxfp8"
    asked = decide("dense", "qkv", spec, hardware.known("h200"), Preference(backend="dequantized"))
    assert asked.chosen == "dequantized"


def test_work_that_is_handed_on_is_as_fast_as_there() -> None:
    """triton_w4a8 gives few tokens to triton_w4a16: with no measurement of its own it must not look faster."""
    both = Freedom((Activations.BF16, Activations.MXFP8))
    for tokens in (1, 16, 64):
        spec = moe_spec(tokens, activations=Activations.BF16)
        decision = decide("moe", "experts", spec, hardware.known("h200"), Preference(), both)
        assert (decision.chosen, decision.tuned) == ("triton_w4a16", True)
        (other,) = (r.reason for r in decision.rejected if r.name == "triton_w4a8")
        assert other.startswith(("no faster", "slower"))
