"""A dense layer with the sum and the norm before it in its own launch, interpreted: the bits of the ops apart, in the
cases of each format and in a model."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from microscale.hardware import known
from microscale.kernels.dense.spec import DenseSpec
from microscale.kernels.op import Reason
from microscale.models.families import build_model, open_weights
from microscale.planning import registry
from microscale.planning.ops import Activations, Ops, Preference
from microscale_lab.cases import dense_from_sum
from microscale_lab.cases.case import hold
from microscale_lab.cases.dense_from_sum import FromSumCase
from ptxproof import TritonKernel
from ptxproof.errors import InterpretError
from support.forward import all_logits
from support.interpreted import Edit, interpreted
from support.ptx_faults import only_in, removed

KERNEL = "small_batch_from_sum"
CASES = [case for case in dense_from_sum.cases() if isinstance(case, FromSumCase)]
# With 352 columns a norm has fewer warps than the program, with 2880 more, and 16 columns a thread.
TRIED = [
    ("h200", "bf16", "2880 by 80"),
    ("h200", "mxfp4", "352 by 144"),
    ("b200", "fp8", "2880 by 80"),
    ("gb10", "mxfp8", "2048 by 32"),
]


def case_of(fmt: str, shape: str) -> FromSumCase:
    name = f"1 x {shape}, from a sum"
    return next(case for case in CASES if case.name == name and case.spec.weight_format == fmt)


def run(card: str, case: FromSumCase, edit: Edit | None = None) -> None:
    gpu = known(card)
    with interpreted(gpu.sm, edit) as ran:
        finish = case.start(gpu, "cpu")
    assert {kernel.short_name for kernel in ran} == {KERNEL, "rms_norm", "small_batch"}
    hold(finish())


@pytest.mark.parametrize("card, fmt, shape", TRIED)
def test_the_bits_of_the_ops_apart(card: str, fmt: str, shape: str) -> None:
    run(card, case_of(fmt, shape))


@pytest.mark.parametrize("which", [0, 1])
def test_a_missing_barrier_is_noticed(which: int) -> None:
    with pytest.raises(InterpretError, match=r"with no barrier between|never written"):
        run("h200", case_of("bf16", "2880 by 80"), only_in(KERNEL, removed(r"bar\.sync", which)))


def test_squares_that_are_added_in_another_order_are_noticed() -> None:
    """Lanes next to each other first."""

    def fault(kernel: TritonKernel, ptx: str) -> str:
        ours, changed = re.subn(
            r"(shfl\.sync\.bfly\.b32 .*), (16|1), 31", lambda m: f"{m[1]}, {17 - int(m[2])}, 31", ptx
        )
        assert changed >= 4
        return ours

    with pytest.raises(AssertionError, match="y, against the ops apart"):
        run("h200", case_of("bf16", "2880 by 80"), only_in(KERNEL, fault))


def test_what_is_refused() -> None:
    case, h200 = case_of("mxfp4", "2880 by 80"), known("h200")

    def refuses(spec: DenseSpec) -> Reason | None:
        return replace(case, spec=spec).refuses(h200)

    assert refuses(case.spec) is None
    assert refuses(replace(case.spec, tokens=2)) == "norms one token, not 2"
    assert refuses(replace(case.spec, columns=4128)) == "norms up to 4096 columns, not 4128"
    assert refuses(replace(case.spec, behind_sum=False)) == "is for layers behind a sum"
    assert case.refuses(known("a100")) == "needs programmatic launches, which NVIDIA A100 80GB does not have"


# ---- in a model ------------------------------------------------------------------------------------------------------

SHAPE = {
    "num_hidden_layers": 3, "hidden_size": 352, "intermediate_size": 96, "num_attention_heads": 8,
    "num_key_value_heads": 1, "num_local_experts": 8, "vocab_size": 256,
}  # fmt: skip


def logits_of(expected: dict[str, int]) -> Tensor:
    """Of three tokens, one after the other. ``expected``: how often which kernels ran."""
    weights = open_weights("gpt-oss-20b", load_format="dummy", overrides=SHAPE)
    ops = Ops(known("h200"), Activations.BF16, Preference())
    model = build_model(weights, ops, torch.device("cpu"), 16, lambda: None)
    with interpreted(known("h200").sm) as ran:
        (logits,) = all_logits(model, [[5, 200, 31]], 1)
    starts = dict.fromkeys(expected, 0)
    for kernel, times in ran.items():
        if kernel.short_name in starts:
            starts[kernel.short_name] += times
    assert starts == expected
    return logits


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_models_logits_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer but the first, which reads the embedding. Of a token, five norms stay by themselves: before the
    first layer, after the last one, and before each router, for which there is no kernel at this size."""
    together = logits_of({KERNEL: 6, "rms_norm": 15, "small_batch": 12})
    monkeypatch.setattr(type(registry.dense("triton_bf16")), "sum_paths", ())
    apart = logits_of({KERNEL: 0, "rms_norm": 21, "small_batch": 18})
    assert torch.equal(together, apart)
