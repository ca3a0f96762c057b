"""The gate refuses kernels that are bad on purpose, each with a sentence, and lets good ones pass on every SM."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from rich.console import Console
from torch import Tensor
from triton.experimental.gluon import language as gl

from lab.prove import bad_kernels
from microscale.errors import BadSetting, Unsupported
from microscale.hardware import Feature, Gpu
from microscale.kernels.compiling.pool import Died, run_forked
from microscale.kernels.launch import Kernel, Launch
from microscale.kernels.small import fused_jit
from microscale_lab.markdown import write_section
from microscale_lab.prove import run
from microscale_lab.prove.bridge import proof_kernel
from microscale_lab.prove.command import run_prove
from microscale_lab.prove.report import as_markdown, refusals
from microscale_lab.prove.run import ProofRow, Source, check, prove
from ptxproof.cache import FactsCache
from ptxproof.compiler import Facts, cache_key
from ptxproof.targets import PROVED_SMS, matrix_instructions, target

BLOCK_SCALED = r"mma\.sync.*block_scale"
SMALL_TILE = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}


def meta(dtype: torch.dtype) -> Tensor:
    return torch.empty((64, 64), dtype=dtype, device="meta")


def make(fn: Any, arguments: tuple[Any, ...], constants: dict[str, Any], **rest: Any) -> Kernel:
    """The kernel of a launch of ``fn``."""
    options, promise = rest.get("options", {}), rest.get("promise")
    return Launch(fn, (1,), arguments, constants, options, promise, rest.get("spills_because")).kernel()


def matmul(tile: dict[str, int] = SMALL_TILE, **rest: Any) -> Kernel:
    return make(bad_kernels.matmul, (*[meta(torch.bfloat16)] * 3, 64), tile, **rest)


def block_scaled(b_format: str, **options: Any) -> Kernel:
    arguments = (*[meta(torch.uint8)] * 4, meta(torch.float32))
    constants = {"M": 32, "N": 32, "K": 128, "B_FORMAT": b_format}
    return make(bad_kernels.block_scaled, arguments, constants, promise=BLOCK_SCALED, options=options)


def scatter() -> Kernel:
    arguments = (meta(torch.bfloat16), meta(torch.int32), meta(torch.bfloat16), 100, 64)
    return make(bad_kernels.descriptor_scatter, arguments, {"BLOCK_M": 32, "BLOCK_N": 64})


def only(*kernels: Kernel) -> Source:
    """These, on every card."""
    return lambda gpu: kernels


def prove_one(kernel: Kernel, gpus: Sequence[str]) -> list[ProofRow]:
    rows = prove(only(kernel), gpus)
    assert [row.variant for row in rows] == [f"bad_kernels/{kernel.label}"] * len(rows)
    return rows


def test_a_good_kernel_passes_everywhere_with_the_instruction_of_each_card() -> None:
    rows = prove(only(matmul(promise=r"mma")), "all")
    assert [row.sm for row in rows] == list(PROVED_SMS) == [80, 86, 89, 90, 100, 103, 120, 121]
    assert [(row.ok, row.reason) for row in rows] == [(True, None)] * 8
    found = {row.sm: row.mma for row in rows}
    plain = ("mma.sync bf16",)
    assert found == {
        **dict.fromkeys((80, 86, 89, 120, 121), plain),
        90: ("wgmma bf16",),
        **dict.fromkeys((100, 103), ("tcgen05 f16",)),
    }
    for row in rows:
        assert 0 < (row.shared or 0) <= row.shared_limit == target(row.sm).shared_limit
        assert 32 <= (row.registers or 0) <= 255
        assert row.spill_bytes == 0


def test_a_descriptor_scatter_is_refused_where_ptxas_fails_and_where_it_does_not() -> None:
    sentence = (
        "Uses tile::scatter4, a scatter through a tensor descriptor, which ptxas refuses for SM 9.0, 12.0 and 12.1; "
        "store through plain pointers."
    )
    for row in prove_one(scatter(), ["h200", "b200", "rtx5090", "gb10"]):
        assert (row.ok, row.reason) == (False, sentence)
        assert (row.shared is None) == (row.sm != 100), "only SM 10.0 has the instruction"


def test_a_tile_too_large_is_refused_where_it_does_not_fit() -> None:
    tile = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
    small, large = prove_one(matmul(tile, options={"num_stages": 5, "num_warps": 8}), ["gb10", "a100"])[::-1]
    assert large.ok
    assert large.shared == small.shared == 131072
    assert (small.ok, small.reason) == (
        False,
        "Needs 131072 bytes of shared memory, and a block on SM 12.1 may use 101376; "
        "take a smaller tile or fewer stages.",
    )


def test_a_fall_back_to_bf16_is_refused() -> None:
    for row in prove_one(block_scaled("e2m1", arch="sm120"), ["rtx5090", "gb10"]):
        label = target(row.sm).label
        assert (row.ok, row.reason) == (
            False,
            f"Was promised mma.sync…block_scale on {label} and compiled to mma.sync bf16: "
            "the compiler fell back without a word.",
        )


def test_the_promised_block_scaled_instruction_passes() -> None:
    for row in prove_one(block_scaled("e4m3", arch="sm120"), ["rtx5090", "gb10"]):
        assert (row.ok, row.mma) == (True, ("mma.sync block_scale mxf8f6f4",)), row.reason


def test_a_spill_is_refused_unless_it_is_excused() -> None:
    starved = {"num_warps": 4, "maxnreg": 32}
    excuse = "it is here to spill"
    (refused,) = prove_one(matmul(options=starved), ["rtx4090"])
    (excused,) = prove_one(matmul(options=starved, spills_because=excuse), ["rtx4090"])
    assert refused.spill_bytes
    assert refused.registers == 32
    assert (refused.ok, refused.reason) == (
        False,
        f"Spills {refused.spill_bytes} bytes of registers to memory; take a smaller tile or more warps, "
        "or say why it may in spills_because.",
    )
    assert (excused.ok, excused.spill_bytes) == (True, refused.spill_bytes)
    assert excused.reason == f"Spills {refused.spill_bytes} bytes, which is allowed: {excuse}."


def test_a_compile_error_is_one_line() -> None:
    (row,) = prove_one(make(bad_kernels.not_even_triton, (meta(torch.float32),), {"BLOCK": 32}), ["rtx3090"])
    assert (row.ok, row.mma, row.shared, row.registers, row.spill_bytes) == (False, (), None, None, None)
    assert row.reason == (
        "Does not compile for SM 8.6: Cannot make_shape_compatible: incompatible dimensions at index 0: 32 and 64."
    )


@pytest.mark.parametrize(
    "kernel, complaint",
    [
        (matmul(SMALL_TILE | {"BLOCK_L": 1}), "no argument or compile option 'BLOCK_L'"),
        (matmul(options={"num_warp": 4}), "no argument or compile option 'num_warp'"),
    ],
    ids=["unknown argument", "unknown option"],
)
def test_what_the_launch_would_refuse_is_refused(kernel: Kernel, complaint: str) -> None:
    (row,) = prove_one(kernel, ["h100"])
    assert not row.ok
    assert row.reason is not None
    assert complaint in row.reason


def test_a_launch_without_all_arguments_is_no_kernel() -> None:
    with pytest.raises(TypeError, match="BLOCK_K"):
        matmul({"BLOCK_M": 64, "BLOCK_N": 64})


def test_gluon_kernels_are_compiled_as_gluon() -> None:
    layout = gl.BlockedLayout([1], [32], [4], [0])
    kernel = make(bad_kernels.gluon_copy, (meta(torch.float32),) * 2, {"LAYOUT": layout, "BLOCK": 128})
    assert [row.reason for row in prove_one(kernel, ["h200", "gb10"])] == [None, None]


def test_faults_are_all_named() -> None:
    kernel = matmul(promise=BLOCK_SCALED)
    facts = Facts(mma=(), shared=200000, tensor_memory=1024, registers=255, spill_bytes=8)
    reason = check(kernel, "toy/bad", target(120), facts).reason
    assert reason is not None
    for part in ("200000 bytes", "1024 columns", "compiled to no matrix instruction", "Spills 8 bytes"):
        assert part in reason


@pytest.mark.parametrize(
    "pattern", [r"mma\.sync.*block_scale", r"mma\.sync\S*block_scale", r"\bmma\.sync[\w.:]+block_scale"]
)
def test_a_broken_promise_reads_as_an_instruction(pattern: str) -> None:
    row = check(matmul(promise=pattern), "toy/bad", target(120), Facts(shared=0, spill_bytes=0))
    assert (row.reason or "").startswith("Was promised mma.sync…block_scale on SM 12.0 and compiled to no matrix")


@pytest.mark.parametrize(
    "ptx, names",
    [
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r1}", ("mma.sync f16",)),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {", ("mma.sync e4m3",)),
        (
            "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 {",
            ("mma.sync block_scale mxf4",),
        ),
        ("wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {", ("wgmma e4m3",)),
        ("@%p1 tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X [", ("tcgen05 block_scale mxf8f6f4",)),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16\nmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
         ("mma.sync bf16", "wgmma bf16")),
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", ()),
    ],
)  # fmt: skip
def test_matrix_instructions_are_read_from_ptx(ptx: str, names: tuple[str, ...]) -> None:
    assert matrix_instructions(ptx) == names


class TestCache:
    def rows(self, folder: Path) -> list[ProofRow]:
        return prove(only(matmul()), ["h100", "h200"], cache_dir=folder)

    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """A list that grows by the number of compilations of each proof from now on."""
        counts: list[int] = []

        def counting(jobs: Sequence[Any], **rest: Any) -> Any:
            counts.append(len(jobs))
            return run_forked(jobs, **rest)

        monkeypatch.setattr(run, "run_forked", counting)
        return counts

    def test_a_second_proof_compiles_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = self.compiled(monkeypatch)
        assert self.rows(tmp_path) == self.rows(tmp_path)
        assert counts == [1, 0], "two cards of one SM share a compilation, and the second proof the first's"

    @pytest.mark.parametrize("content", [b"", b"\xff\xfe", b'{"error": null', b"[1, 2]", b'{"error": null}'])
    def test_a_corrupt_entry_is_compiled_again_and_mended(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
    ) -> None:
        first = self.rows(tmp_path)
        (entry,) = (tmp_path / "prove").iterdir()
        whole = entry.read_bytes()
        entry.write_bytes(content)
        counts = self.compiled(monkeypatch)
        assert self.rows(tmp_path) == first
        assert counts == [1]
        assert entry.read_bytes() == whole

    def test_a_value_of_the_wrong_type_is_no_entry(self, tmp_path: Path) -> None:
        cache = FactsCache(tmp_path)
        facts = Facts(mma=("wgmma bf16",), shared=1, tensor_memory=0, registers=2, spill_bytes=3)
        cache.store("key", facts)
        assert cache.load("key") == facts
        path = tmp_path / "prove" / "key.json"
        for name, wrong in (("shared", "1"), ("registers", True), ("mma", "wgmma"), ("promise_found", 0)):
            path.write_text(json.dumps(facts.to_json() | {name: wrong}))
            assert cache.load("key") is None, name

    def test_errors_are_not_kept(self, tmp_path: Path) -> None:
        FactsCache(tmp_path).store("key", Facts(error="the disk was full"))
        assert not (tmp_path / "prove").exists()

    def test_the_key_names_everything_that_matters(self) -> None:
        base, arguments = matmul(), [meta(torch.bfloat16)] * 3
        others = [
            matmul(SMALL_TILE | {"BLOCK_M": 32}),
            matmul(options={"num_warps": 8}),
            matmul(promise="wgmma"),
            make(base.fn, (*arguments, 1 << 40), SMALL_TILE),
            make(base.fn, (*arguments, 65), SMALL_TILE),
            make(base.fn, (meta(torch.bfloat16)[0, 1:], *arguments[1:], 64), SMALL_TILE),
            make(bad_kernels.not_even_triton, (meta(torch.float32),), {"BLOCK": 32}),
        ]
        keys = [cache_key(proof_kernel(kernel), 90) for kernel in (base, *others)]
        keys.append(cache_key(proof_kernel(base), 120))
        assert len(set(keys)) == len(keys)
        assert cache_key(proof_kernel(matmul()), 90) == keys[0]

    def test_the_key_knows_the_version_of_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = cache_key(proof_kernel(matmul()), 90)
        monkeypatch.setattr(triton, "__version__", "0.0")
        assert cache_key(proof_kernel(matmul()), 90) != before


class TestPool:
    def test_a_crash_costs_one_answer(self) -> None:
        def crash(log: Any) -> dict[str, Any]:
            os.write(log.fileno(), b"LLVM ERROR: out of luck\n")
            os.kill(os.getpid(), signal.SIGKILL)
            return {}

        answers = dict(run_forked([lambda log: {"x": 1}, crash, lambda log: {"x": 3}], num_workers=2))
        assert answers == {0: {"x": 1}, 1: Died("was ended by SIGKILL", "LLVM ERROR: out of luck\n"), 2: {"x": 3}}

    def test_a_compilation_that_never_ends_is_ended(self) -> None:
        def stuck(log: Any) -> dict[str, Any]:
            time.sleep(600)
            return {}

        assert list(run_forked([stuck], num_workers=1, limit_s=0.2)) == [(0, Died("did not end within 0.2 s", ""))]

    def test_the_gate_says_that_the_compiler_crashed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def crashing(jobs: Sequence[Any], **rest: Any) -> Any:
            return ((index, Died("was ended by SIGABRT", "LLVM ERROR: out of luck\n")) for index in range(len(jobs)))

        monkeypatch.setattr(run, "run_forked", crashing)
        (row,) = prove_one(matmul(), ["h200"])
        assert row.reason == "Does not compile for SM 9.0: the compiler was ended by SIGABRT (out of luck)."


def one_per_card(gpu: Gpu) -> Iterable[Kernel]:
    """Another tile on each card, and one more on some."""
    yield matmul(SMALL_TILE | {"BLOCK_M": 32 if gpu.num_sms < 180 else 64})
    if gpu.has(Feature.MX_MMA):
        yield matmul(SMALL_TILE | {"BLOCK_M": 128})


def test_kernels_are_the_union_over_the_cards_of_an_sm() -> None:
    tasks = run.gather(one_per_card, ["rtx5090", "rtxpro6000", "gb10", "h200"])
    assert [(task.sm, task.kernel.constants["BLOCK_M"]) for task in tasks] == [
        (90, 32),
        (120, 32),
        (120, 128),
        (120, 64),
        (121, 32),
        (121, 128),
    ]


def test_kernels_that_differ_in_types_alone_are_told_apart() -> None:
    wide = make(bad_kernels.matmul, (*[meta(torch.float16)] * 3, 65), SMALL_TILE)
    tasks = run.gather(only(matmul(), wide), ["h200"])
    label = "bad_kernels/matmul BLOCK_M=64 BLOCK_N=64 BLOCK_K=64 warps=4"
    assert [task.label for task in tasks] == [
        f"{label} a_ptr:*bf16D b_ptr:*bf16D c_ptr:*bf16D K:i32D",
        f"{label} a_ptr:*fp16D b_ptr:*fp16D c_ptr:*fp16D K:i32",
    ]


def test_an_op_picks_its_kernels() -> None:
    constants = {"BLOCK": 64, "GATE": 1, "ALPHA": 1.0, "LIMIT": 1.0, "RUN": 0, "PDL": False, "PLAIN": False}
    kernel = make(fused_jit.gated, (*[meta(torch.float32)] * 2, 64, 64), constants)
    for op, count in (("small", 1), ("moe", 0)):
        assert len(run.gather(only(kernel), ["h200"], [op])) == count


def test_interpreted_kernels_are_refused_with_the_mend() -> None:
    with pytest.raises(Unsupported, match="without TRITON_INTERPRET=1"):
        make(lambda x: x, (), {})


class TestCommand:
    def run(self, *kernels: Kernel, **rest: Any) -> tuple[int, str]:
        out = StringIO()
        status = run_prove(only(*kernels), console=Console(file=out, width=100), **rest)
        return status, out.getvalue()

    def test_json_has_exactly_the_documented_keys(self) -> None:
        status, text = self.run(matmul(), gpu="h200", json_output=True)
        assert status == 0
        (row,) = json.loads(text)
        assert row == {
            "op": "lab",
            "variant": f"bad_kernels/{matmul().label}",
            "sm": 90,
            "ok": True,
            "reason": None,
            "mma": ["wgmma bf16"],
            "shared": 49152,
            "shared_limit": 232448,
            "registers": row["registers"],
            "spill_bytes": 0,
        }

    def test_the_table_and_the_status_show_a_refusal(self) -> None:
        status, text = self.run(scatter(), matmul(), gpu="gb10")
        assert status == 1
        assert "lab on SM 12.1, 101376 bytes of shared memory a block" in text
        assert re.search(r"bad_kernels/matmul.* +mma\.sync bf16 +32768 +\d+ +0 +yes", text)
        assert re.search(r"✗ lab bad_kernels/descriptor_scatter.* on SM 12.1: Uses tile::scatter4", text)
        assert text.endswith(f"2 kernels compiled for SM 12.1 with Triton {triton.__version__}: 1 refused.\n")

    def test_refusals_with_one_reason_are_one_sentence(self) -> None:
        bad = [ProofRow("toy", f"toy/{name}", 90, False, "No.", (), 0, 0, 0, 0) for name in "abc"]
        good = ProofRow("toy", "toy/d", 90, True, None, (), 0, 0, 0, 0)
        elsewhere = dataclasses.replace(bad[0], sm=120)
        assert list(refusals([*bad, good, elsewhere])) == [
            "toy toy/a and 2 more on SM 9.0: No.",
            "toy toy/a on SM 12.0: No.",
        ]

    def test_unknown_names_and_nothing_to_prove_are_errors(self) -> None:
        with pytest.raises(Unsupported, match="Unknown GPU 'voodoo'"):
            self.run(matmul(), gpu="voodoo")
        with pytest.raises(BadSetting, match="--op moo: there is no such op; the ops are moe, dense"):
            self.run(matmul(), op="moo")
        with pytest.raises(BadSetting, match="at least one process"):
            self.run(matmul(), jobs=0)
        with pytest.raises(Unsupported, match="no kernel to prove for any op on GPU h200"):
            self.run(gpu="h200")

    def test_the_page_keeps_its_text_and_one_section_per_triton(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        page = tmp_path / "kernels.md"
        page.write_text("# Kernels\n\nProse.\n")
        assert self.run(matmul(), gpu="h200", markdown=page)[0] == 0
        assert self.run(matmul(), gpu="h200", markdown=page)[0] == 0
        once = page.read_text()
        assert once.startswith("# Kernels\n\nProse.\n")
        assert once.count("| 9.0 | bad_kernels | 1 | wgmma bf16 | 49152 |") == 1
        monkeypatch.setattr(triton, "__version__", "0.0")
        row = ProofRow("toy", "toy/x", 90, True, None, (), 0, 232448, 8, 0)
        write_section(page, "proof with Triton 0.0", as_markdown([row]))
        assert page.read_text().startswith(once.rstrip())
        assert "## Triton 0.0" in page.read_text()
        with pytest.raises(BadSetting, match="cannot be rewritten"):
            write_section(tmp_path / "nowhere.md", "proof", "")
