"""Versions of Triton that are known to be wrong: no kernel of ours has such a form, and a path that had is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from microscale.explain import Question, explain, render
from microscale.hardware import FAMILY_OF_SM, KNOWN, Gpu, known, triton_faults
from microscale.hardware.triton_faults import (
    FAULTS,
    USED_BY,
    TritonFault,
    TritonForm,
    faults_of,
    installed_triton,
    refusal,
    users,
)
from microscale.kernels.launch import Kernel, Launch
from microscale.models.outline import outline
from microscale.planning import registry
from microscale.planning.choose_kernel import Preference
from microscale.planning.ops import Activations
from microscale.planning.paths import PATH_LISTS
from microscale.planning.plan import Setup, make_plan
from microscale.planning.precision import make_precision
from microscale_lab.prove.inventory import Setting, models, record_setting
from support import triton_form_kernels as seeded
from support.triton_forms import forms_of

WRONG = {fault.form for fault in FAULTS}
ADDRESS = re.compile(r"https://github\.com/triton-lang/triton/(issues|pull)/\d+")


# ---- the list --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.form.name)
def test_a_row_has_a_public_report_and_names_releases_and_sms(fault: TritonFault) -> None:
    assert ADDRESS.fullmatch(fault.issue)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in fault.versions)
    assert fault.sms is None or fault.sms <= FAMILY_OF_SM.keys()


def test_versions_and_sms_are_sets() -> None:
    packed = TritonForm.SCALED_E2M1_MN
    assert refusal({packed}, "3.8.0", 120)
    assert refusal({packed}, "3.8.0+git675c5987", 121)
    for version, sm in (("3.7.1", 120), ("3.8.1", 120), ("3.8.0", 100), (None, 120)):
        assert refusal({packed}, version, sm) is None
    assert refusal({TritonForm.DOT}, "3.8.0", 120) is None
    assert "issues/11733" in (refusal({TritonForm.DOT, packed}, "3.8.0", 120) or "")


def test_the_installed_version_is_that_of_the_module() -> None:
    assert installed_triton() == triton.__version__
    assert known("gb10").triton == triton.__version__


# ---- what our kernels have -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("card", "setting"),
    [
        ("b200", Setting("fast")),
        ("gb10", Setting(dense="fp8", moe_activations="mxfp8", kv="fp8")),
    ],
)
def test_kernels_have_the_forms_that_their_paths_name_and_none_that_is_wrong(card: str, setting: Setting) -> None:
    gpu = known(card)
    found = record_setting(models()["gpt-oss-20b"], gpu, setting)
    assert found is not None
    products = {
        (kernel.name, *((name, value) for name, value in kernel.constants.items() if isinstance(value, bool))): kernel
        for kernel in found
        if not kernel.fn.is_gluon() and kernel.op in ("moe", "dense", "attention")
    }  # sizes of tiles change no form
    had: dict[str, set[TritonForm]] = {}
    for kernel in products.values():
        forms = forms_of(kernel, gpu.sm)
        assert not forms & WRONG, f"{kernel.name} has {forms & WRONG}"
        had.setdefault(kernel.op, set()).update(forms)
    for op, of_op in had.items():
        named = {form for entry in registry.of_op(op) for path in all_paths(entry) for form in path.uses}
        assert of_op, f"no kernel of {op} has a product"
        assert of_op <= named, f"paths of {op} do not name {of_op - named}"


def all_paths(entry: Any) -> list[Any]:
    return [path for name in PATH_LISTS for path in getattr(entry, name, ())]


def test_no_path_names_a_form_that_is_wrong() -> None:
    uses = {path.uses for entry in registry.IMPLEMENTATIONS for path in all_paths(entry)} - {frozenset()}
    assert uses == set(USED_BY.values())
    named = {form for forms in uses for form in forms}
    assert named == {TritonForm.DOT, TritonForm.SCALED_E4M3, TritonForm.SCALED_E2M1, TritonForm.PACKED_ASM}
    assert not named & WRONG
    assert users(TritonForm.SCALED_E4M3)
    assert not users(TritonForm.SCALED_E2M1_MN)


# ---- the detector sees each form -------------------------------------------------------------------------------------


def kernel_of(fn: Any, *numbers: int, promise: str | None = None, **constants: Any) -> Kernel:
    x = torch.empty(4, dtype=torch.uint8, device="meta")
    return Launch(fn, (1,), (x, x.float(), *numbers), constants, {}, promise, None).kernel()


SEEDED: dict[TritonForm, Callable[[], Kernel]] = {
    TritonForm.SCALED_E2M1_MN: lambda: kernel_of(seeded.scaled_mn, promise="block_scale"),
    TritonForm.SCALED_IN_BF16: lambda: kernel_of(seeded.scaled_e4m3),
    TritonForm.CHAINED_DOTS: lambda: kernel_of(seeded.loop, 7, CHAINED=True, RECURRENT=False),
    TritonForm.RECURRENT_DOT: lambda: kernel_of(seeded.loop, 7, CHAINED=False, RECURRENT=True),
    TritonForm.PACKED_ASM_BROADCAST: lambda: kernel_of(seeded.asm, BROADCAST=True),
}


@pytest.mark.parametrize("form", sorted(WRONG), ids=lambda form: form.name)
def test_a_wrong_form_is_seen(form: TritonForm) -> None:
    assert form in forms_of(SEEDED[form](), 120)


@pytest.mark.parametrize(
    ("kernel", "forms"),
    [
        (kernel_of(seeded.scaled_e4m3, promise="block_scale"), {TritonForm.SCALED_E4M3}),
        (kernel_of(seeded.loop, 7, CHAINED=False, RECURRENT=False), {TritonForm.DOT}),
        (kernel_of(seeded.attention, 7), {TritonForm.DOT}),
        (kernel_of(seeded.asm, BROADCAST=False), {TritonForm.PACKED_ASM}),
    ],
    ids=["scaled", "loop", "attention", "asm"],
)
def test_other_forms_are_told_apart(kernel: Kernel, forms: set[TritonForm]) -> None:
    assert forms_of(kernel, 120) == forms


# ---- the oracle ------------------------------------------------------------------------------------------------------

SEED = "9.9.9"
"""No Triton has this version, so nothing that was remembered of other cards is asked for."""


@pytest.fixture
def wrong_gb10(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A card whose Triton is wrong for the scaled products that we do use."""
    address = "https://github.com/triton-lang/triton/issues/1"
    fault = TritonFault(TritonForm.SCALED_E4M3, frozenset({SEED}), frozenset({121}), "all of it", address)
    monkeypatch.setattr(triton_faults, "FAULTS", (*FAULTS, fault))
    return replace(known("gb10"), triton=SEED)


def plan_of(gpu: Gpu, precision: str) -> dict[tuple[str, str, int], tuple[str, tuple[Any, ...]]]:
    name = "gpt-oss-20b"
    uses = outline(name, models()[name], Activations.BF16, 16, 4096).uses
    plan = make_plan(
        name, uses, Setup(gpu, Activations.BF16, Preference(), make_precision(precision, [], "auto", "auto"))
    )
    return {key: (decision.chosen, decision.path_spans) for key, decision in plan.decisions.items()}


def test_a_path_that_triton_compiles_wrong_is_refused_and_another_runs(wrong_gb10: Gpu) -> None:
    right, wrong = (plan_of(gpu, "balanced") for gpu in (known("gb10"), wrong_gb10))
    path = "grouped, block-scaled"
    assert any(span.path == path for _, spans in right.values() for span in spans)
    assert not any(span.path == path for _, spans in wrong.values() for span in spans)
    reasons = {r.reason for _, spans in wrong.values() for span in spans for r in span.rejected}
    assert any("issues/1)" in reason and SEED in reason for reason in reasons)


def test_an_implementation_that_is_left_without_a_path_is_not_chosen(wrong_gb10: Gpu) -> None:
    """The dense layers with 8-bit activations have no other way for large batches."""
    for key, (chosen, spans) in plan_of(wrong_gb10, "fast").items():
        assert not (key[0] == "dense" and chosen.endswith("_a8") and key[2] > 16), key
        fused = ("from the projection", "with a dense MLP", "summed by the next norm", "with its norm")
        assert all(span.path for span in spans if not span.form.endswith(fused))


def test_explain_says_it(wrong_gb10: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN, "gb10", wrong_gb10)
    report = explain(Question("gpt-oss-20b", "gb10", precision=make_precision("balanced", [], "auto", "auto")))
    text = "\n".join(str(line) for line in render(report))
    assert "https://github.com/triton-lang/triton/issues/1" in text


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0"])
@pytest.mark.parametrize("card", ["gb10", "b200"])
def test_known_versions_change_no_decision(card: str, version: str) -> None:
    """What they get wrong we do not use."""
    gpu = known(card)
    assert faults_of(version, gpu.sm)
    assert plan_of(replace(gpu, triton=version), "fast") == plan_of(replace(gpu, triton=None), "fast")
