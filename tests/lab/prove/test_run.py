"""``prove --run``: the case tables, executed on a CPU as cards that are not here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from microscale import settings
from microscale.cli import app
from microscale.errors import BadSetting, Unsupported
from microscale.hardware import known
from microscale.kernels.launch import Kernel
from microscale_lab.cases import KernelCase, all_cases
from microscale_lab.cases.dense import QUANTISED, DenseKernelCase
from microscale_lab.cases.moe import ExpertsCase
from microscale_lab.cases.small import SmallCase
from microscale_lab.prove import inventory
from microscale_lab.prove.bridge import proof_kernel
from microscale_lab.prove.command import run_cases
from microscale_lab.prove.execute import execute, run_case
from microscale_lab.prove.executed_report import KEYS, RunRow, print_end, print_rows, rows_of
from microscale_lab.prove.selection import CPU, NOT_NEEDED, CaseOnCard, Selection, rehearse, select, shorten
from ptxproof import cache as ptx_cache
from ptxproof.compiler import compile_to_ptx
from ptxproof.targets import SAME_PTX

pytestmark = pytest.mark.timeout(600)
MATRIX_OPS = ("moe", "dense", "attention")
MODELS = ("gpt-oss-20b", "gemma-4-26b-a4b", "qwen3-30b-a3b")


def cases_of(op: str, kind: type[KernelCase] = KernelCase) -> list[KernelCase]:
    return [case for case in all_cases() if case.op == op and isinstance(case, kind) and not case.large]


def small_case(title: str) -> KernelCase:
    return next(case for case in cases_of("small") if isinstance(case, SmallCase) and case.title == title)


def run_quickly(**options: Any) -> tuple[int, list[dict[str, Any]]]:
    out = StringIO()
    status = run_cases(
        device=CPU, quick=True, jobs=1, cache_dir=settings.load().cache_dir, json_output=True,
        console=Console(file=out, width=120), **options,
    )  # fmt: skip
    return status, json.loads(out.getvalue())


@pytest.mark.slow
@pytest.mark.parametrize("op", MATRIX_OPS)
@pytest.mark.parametrize("card", ["a100", "gb10"])
def test_every_matrix_kernel_is_executed(card: str, op: str) -> None:
    """Each jit function in each form of its weights, on at least one case."""
    status, rows = run_quickly(gpu=card, op=op)
    assert status == 0, [row["reason"] for row in rows if not row["ok"]]
    for row in rows:
        assert tuple(row) == KEYS
        assert row["op"] == op
        assert row["sm"] == known(card).sm
        assert row["executed_on"] == CPU
        assert row["cases"] > 0
        assert row["ok"], row["reason"]
        most = 0.2 if "NVFP4" in row["variant"] else 0.1  # two roundings to four bits
        assert 0 <= row["rms"] <= most, "an error that no format here allows"


@cache
def started(card: str) -> frozenset[Kernel]:
    """What the cases of a card start."""
    selected = select([known(card)], all_cases(), CPU)
    return frozenset(kernel for unit in selected.units for kernel in unit.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("card", ["gb10", "a100", "h200"])
def test_every_function_that_a_model_starts_has_a_case(card: str) -> None:
    recorded = {kernel.name for kernel in inventory.recorded(known(card), MODELS, inventory.SETTINGS[1:4:2])}
    assert len(recorded) > 30
    without = recorded - {kernel.name for kernel in started(card)}
    assert not without, f"no case starts {sorted(without)} on {card}"


def without_header(ptx: str) -> str:
    """Comments and ``.target`` aside: what is executed."""
    return re.sub(r"^(//.*|\.target .*)$", "", ptx, flags=re.MULTILINE)


@pytest.mark.parametrize("op", [*MATRIX_OPS, "small", "sampling"])
def test_the_ptx_of_both_consumer_architectures_is_one(op: str) -> None:
    """So what was executed as one stands for the other."""
    ((one, other),) = SAME_PTX.items()
    cards = {gpu.sm: gpu for gpu in map(known, ("rtx5090", "gb10"))}
    cases = [case for case in cases_of(op) if case.refuses(cards[one]) is None]
    if op == "moe":
        cases = [case for case in cases if isinstance(case, ExpertsCase) and case.activations.narrow]
    case = cases[-1]
    kernel = max(rehearse(case, cards[one]).kernels, key=lambda kernel: (kernel.promise is not None, kernel.label))
    ptx = {sm: compile_to_ptx(proof_kernel(kernel), sm)[0] for sm in (one, other)}
    assert ptx[one] != ptx[other]
    assert without_header(ptx[one]) == without_header(ptx[other])
    if op == "moe":
        assert "block_scale" in ptx[one]


def executed(
    cards: Iterable[str], cases: Iterable[KernelCase], cache_dir: Path, **options: Any
) -> tuple[Selection, list[RunRow]]:
    selected = select([known(card) for card in cards], cases, CPU)
    return selected, rows_of(execute(selected, device=CPU, jobs=1, cache_dir=cache_dir, **options), CPU)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", QUANTISED)
@pytest.mark.parametrize("card", ["a100", "h200", "gb10"])
def test_dense_programs_of_32_tokens(card: str, fmt: str) -> None:
    """With one row tile in a program, and with four."""
    wanted = [
        case
        for case in cases_of("dense", DenseKernelCase)
        if isinstance(case, DenseKernelCase) and case.fmt == fmt and 16 < case.spec.tokens <= 64
        and any(kernel.constants.get("N") == 32 for kernel in rehearse(case, known(card)).kernels)
    ]  # fmt: skip
    selected, rows = executed([card], wanted, settings.load().cache_dir)
    assert all(row.ok for row in rows), [row.reason for row in rows]
    started = {kernel for unit in selected.units for kernel in unit.kernels if kernel.short_name == "small_batch"}
    assert {(kernel.constants["N"], kernel.constants["B"]) for kernel in started} >= {(32, 1), (32, 4)}


def test_cards_that_start_the_same_kernels_share_an_execution(tmp_path: Path) -> None:
    selected, rows = executed(["rtx5090", "rtxpro6000", "gb10"], [small_case("rms_norm")], tmp_path)
    assert len(selected.units) == 1
    assert len(selected.standing) == 3
    by_sm = {row.sm: row for row in rows}
    assert all(row.ok and row.cases == 1 for row in rows)
    assert by_sm[121].reason is None
    assert by_sm[120].reason == "SM 12.0's PTX is SM 12.1's but for its header, and ran as that."
    assert by_sm[120].cards == ("NVIDIA RTX 5090", "NVIDIA RTX PRO 6000") or len(by_sm[120].cards) == 2


def test_a_second_run_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = small_case("gated")
    executed(["a100"], [case], tmp_path)
    assert list((tmp_path / "ptx").glob("*.json"))

    def refuse(kernel: Kernel, sm: int) -> tuple[str, int]:
        raise AssertionError("compiled again")

    monkeypatch.setattr(ptx_cache, "compile_to_ptx", refuse)
    _, (row,) = executed(["a100"], [case], tmp_path)
    assert row.ok
    for kept in (tmp_path / "ptx").glob("*.json"):
        kept.write_text("{}")
    _, (row,) = executed(["a100"], [case], tmp_path)
    assert not row.ok
    assert "compiled again" in str(row.reason)


def sums_instead_of_products(kernel: Kernel, ptx: str) -> str:
    return ptx.replace("mul.f32", "add.f32")


def without_its_barriers(kernel: Kernel, ptx: str) -> str:
    return re.sub(r"bar\.sync\s+0;", "", ptx) if kernel.short_name == "down_direct" else ptx


def with_an_unknown_instruction(kernel: Kernel, ptx: str) -> str:
    return ptx.replace("ret;", "tensormap.cp_fenceproxy %rd1; ret;", 1)


def test_wrong_numbers_fail_the_case(tmp_path: Path) -> None:
    _, (row,) = executed(["gb10"], [small_case("gated")], tmp_path, edit=sums_instead_of_products)
    assert not row.ok
    assert row.cases == len(row.failed) == 1
    assert re.search(r"runs of 0: y: the worst error is \S+ \(allowed \S+\), the RMS error", str(row.reason))


def test_a_case_that_compares_nothing_fails() -> None:
    case = small_case("gated")
    assert isinstance(case, SmallCase)
    silent = replace(case, build=lambda ops, gpu, device: lambda: iter(()))
    assert run_case(CaseOnCard(silent, known("gb10"), ()), CPU).fault == "the case compares nothing"


def test_a_race_fails_the_case_though_the_numbers_are_right(tmp_path: Path) -> None:
    case = next(case for case in cases_of("moe", ExpertsCase) if case.name.startswith("mxfp4, one token"))
    _, (row,) = executed(["gb10"], [case], tmp_path, edit=without_its_barriers)
    assert not row.ok
    assert "with no barrier between" in str(row.reason)


def test_what_is_not_interpreted_is_counted_and_is_no_failure(tmp_path: Path) -> None:
    _, (row,) = executed(["gb10"], [small_case("gated")], tmp_path, edit=with_an_unknown_instruction)
    assert (row.cases, row.failed, row.ok, row.worst) == (0, [], False, None)
    assert re.match(r"1 not executed: line \d+, tensormap\.cp_fenceproxy", str(row.reason))


def test_what_a_card_does_not_have_is_left_out_with_its_reason() -> None:
    selected = select([known("a100")], [case for case in cases_of("moe") if "70 tokens" in case.name], CPU)
    assert len(selected.left_out) == 3  # all formats with narrow activations
    assert any(left.reason.startswith("needs a block-scaled matrix instruction") for left in selected.left_out)
    assert {left.variant for left in selected.left_out} == {None}
    large = select([known("a100")], [case for case in all_cases() if case.op == "sampling" and case.large], CPU)
    assert [left.variant for left in large.left_out] == ["triton_sampling, filtered"]


def test_the_status_is_1_when_a_case_fails_and_options_are_checked() -> None:
    status, rows = run_quickly(gpu="gb10", op="small", edit=sums_instead_of_products)
    assert status == 1
    assert any(not row["ok"] and row["reason"] for row in rows)
    with pytest.raises(BadSetting, match="cases run on cuda or on cpu"):
        run_cases(device="tpu")
    with pytest.raises(BadSetting, match="there is no such op"):
        run_cases(op="experts")


def test_names_of_cases_are_unique() -> None:
    names = [(case.op, type(case).__name__, getattr(case, "title", ""), getattr(case, "entry", None), case.name)
             for case in all_cases()]  # fmt: skip
    assert len(set(names)) == len(names)


def test_without_a_gpu_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microscale_lab.prove.command.cuda_device", lambda: None)
    with pytest.raises(Unsupported, match="there is no CUDA device here"):
        run_cases(device="cuda")


def shown(selected: Selection, rows: list[RunRow]) -> list[str]:
    console = Console(file=StringIO(), width=120)
    print_rows(rows, console)
    print_end(rows, selected, console)
    assert isinstance(console.file, StringIO)
    return [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]


def test_the_table_of_what_is_right(tmp_path: Path) -> None:
    selected, rows = executed(["rtx5090", "gb10"], [small_case("rms_norm")], tmp_path)
    lines = shown(selected, rows)
    assert lines[0].split() == ["op", "variant", "card", "kernels", "cases", "worst", "RMS", "spelled", "out", "ok"]
    cards = [line for line in lines if line.startswith("small") and line.endswith("yes")]
    assert len(cards) == 2
    assert all(re.search(r"NVIDIA (GeForce RTX 5090|GB10) +1 +1 +0 +0 +- +yes", line) for line in cards)
    assert sum("PTX is SM 12.1's but for its header" in line for line in lines) == 1
    assert lines[-2:] == [
        "1 kernels executed in 1 cases on cpu: all as the reference says.",
        "Every variant ran of NVIDIA GB10, NVIDIA GeForce RTX 5090.",
    ]


def test_the_table_of_what_is_wrong_or_was_not_executed(tmp_path: Path) -> None:
    lines = shown(*executed(["gb10"], [small_case("gated")], tmp_path, edit=sums_instead_of_products))
    assert any(line.startswith("small") and line.endswith("1 not") for line in lines)
    (fault,) = (line for line in lines if line.startswith("✗"))
    assert re.match(r"✗ small .* on SM 12\.1: .*the worst error is", fault)
    assert lines[-2].endswith("1 not as the reference says.")
    lines = shown(*executed(["gb10"], [small_case("gated")], tmp_path, edit=with_an_unknown_instruction))
    assert any(line.startswith("small") and line.endswith("not run") for line in lines)
    assert any(line.startswith("· small") and "1 not executed" in line for line in lines)
    assert lines[-1] == "Nothing was executed."


def unknown_on_another_card(kernel: Kernel, ptx: str) -> str:
    return with_an_unknown_instruction(kernel, ptx) if ".target sm_80" in ptx else ptx


def test_a_card_whose_variants_did_not_run_is_not_counted_as_right(tmp_path: Path) -> None:
    lines = shown(*executed(["gb10", "a100"], [small_case("gated")], tmp_path, edit=unknown_on_another_card))
    assert lines[-3:] == [
        "1 kernels executed in 1 cases on cpu: all as the reference says.",
        "Every variant ran of NVIDIA GB10.",
        "Not every variant ran of NVIDIA A100 80GB; without 1: small triton_small, gated.",
    ]


def test_what_quick_leaves_out_is_named_and_is_no_variant() -> None:
    selected = select([known("gb10")], cases_of("sampling"), CPU)
    short = shorten(selected)
    variants = [{unit.case.variant(unit.gpu) for unit in each.units} for each in (selected, short)]
    assert variants[0] == variants[1]
    left = [left for left in short.left_out if left.reason == NOT_NEEDED]
    assert len(left) == len(selected.units) - len(short.units) > 0
    assert {left.variant for left in left} <= variants[0]


def test_prove_run_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MICROSCALE_CACHE_DIR", str(tmp_path))
    asked = ["prove", "--run", "--gpu", "gb10", "--op", "drafts", "--quick", "--device", "cpu"]
    ran = CliRunner().invoke(app, asked)
    assert ran.exit_code == 0, ran.output
    assert "executed in 4 cases on cpu: all as the reference says." in ran.output
    assert re.search(r"compiling: 0 of \d+\n(.*\n)*executing: 4 of 4\n", ran.output), "progress, where no terminal is"
    with pytest.raises(BadSetting, match="--device needs --run"):
        CliRunner().invoke(app, ["prove", "--quick"], catch_exceptions=False)
    with pytest.raises(BadSetting, match="--markdown does not work with --run"):
        CliRunner().invoke(app, ["prove", "--run", "--markdown", str(tmp_path / "page.md")], catch_exceptions=False)
