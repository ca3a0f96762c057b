"""The command line as a user meets it: output, one-sentence errors, exit statuses.

Most runs share this process, which saves importing torch each time; a few are processes of their own.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from microscale import __main__ as entry
from microscale import cli
from microscale.cli import serve
from microscale.engine.client import launch as launching
from microscale.engine.protocol.messages import Ready
from microscale.errors import BadCheckpoint
from microscale.hardware import Gpu, known
from microscale.models import embedded, hub
from microscale_lab.cli import played
from microscale_lab.prove import bridge
from ptxproof import CardRun
from support.tiny_checkpoints import CASES, write_hf

TINY = ("generate", "gpt-oss-tiny", "--load-format", "dummy", "--prompt-ids", "1,2,3")


@dataclass(frozen=True)
class Run:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def microscale(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Calls the entry point with these arguments and environment variables."""

    def call(*arguments: str, **env: str) -> Run:
        monkeypatch.setattr(sys, "argv", ["microscale", *arguments])
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        try:
            cli.main()
            status = 0
        except SystemExit as exit_:
            status = int(exit_.code or 0)
        return Run(status, *capsys.readouterr())

    return call


def process(*arguments: str, **env: str) -> Run:
    """The same in a process of its own with a bare environment."""
    command = [sys.executable, "-m", "microscale", *arguments]
    base = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=base | env)
    return Run(run.returncode, run.stdout, run.stderr)


def refused(run: Run, *parts: str) -> None:
    """One sentence on standard error with these parts, exit status 1, nothing on standard output, no traceback."""
    assert run.returncode == 1, run
    assert run.stdout == ""
    assert run.stderr.startswith("error: ")
    assert len(run.stderr.splitlines()) == 1, run.stderr
    for part in parts:
        assert part in run.stderr


def test_generate_prints_token_ids(microscale: Callable[..., Run]) -> None:
    plain = process(*TINY, "--max-tokens", "5")
    assert plain.returncode == 0, plain.stderr
    as_json = json.loads(microscale(*TINY, "--max-tokens", "5", "--json").stdout)
    assert as_json["token_ids"] == [int(t) for t in plain.stdout.strip().split(",")]
    assert len(as_json["logprobs"]) == len(as_json["token_ids"]) == 5
    assert all(logprob <= 0 for logprob in as_json["logprobs"])
    assert as_json["finish_reason"] == "length"


def test_a_seed_repeats_and_temperature_matters(microscale: Callable[..., Run]) -> None:
    sampled = [microscale(*TINY, "--temperature", "5", "--seed", "3").stdout for _ in range(2)]
    assert sampled[0] == sampled[1] != microscale(*TINY, "--seed", "3").stdout


def test_precision_is_followed_and_the_plan_is_shown_once(microscale: Callable[..., Run]) -> None:
    run = microscale(*TINY, "--precision", "fast", "--layer-format", "o=mxfp8", "--layer-format", "embed=fp8")
    assert run.returncode == 0
    lines = run.stderr.splitlines()
    assert lines[0].startswith("gpt-oss-tiny on CPU, precision fast, o=mxfp8, embed=fp8, weights ")
    assert [line.split()[:2] for line in lines if line.startswith(("qkv", "o "))] == [["qkv", "mxfp4"], ["o", "mxfp8"]]
    assert run.stdout != microscale(*TINY).stdout


def test_threads_can_be_fixed(microscale: Callable[..., Run]) -> None:
    before = torch.get_num_threads()
    try:
        run = microscale(*TINY, "--threads", "2")
        assert run.returncode == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert [microscale(*TINY, "--threads", number).returncode for number in ("0", "5000")] == [2, 2]


def test_explain_exits_by_whether_the_model_fits(microscale: Callable[..., Run]) -> None:
    fits, refused_ = (microscale("explain", "gpt-oss-120b", "--gpu", gpu, "--json") for gpu in ("gb10", "l40s"))
    assert (fits.returncode, refused_.returncode) == (0, 1)
    assert json.loads(fits.stdout)["memory"]["max_context"] == 131072
    assert json.loads(refused_.stdout)["memory"]["max_context"] == 0
    text = microscale("explain", "gpt-oss-120b", "--gpu", "gb10", "--precision", "balanced", "--batch", "4").stdout
    why = ("explain", "gpt-oss-120b", "--gpu", "gb10", "--precision", "balanced", "--why")
    assert "triton_w4a8" not in text
    assert "triton_w4a8" in microscale(*why).stdout
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_checkpoint_on_disk_with_every_option(microscale: Callable[..., Run], tmp_path: Path) -> None:
    folder = str(write_hf(tmp_path / "model", CASES["heads_4_2"]))
    ids = ("--prompt-ids", ",".join(map(str, range(40))), "--max-tokens", "4", "--json")
    outputs = [
        microscale("generate", folder, *ids, *options)
        for options in (
            (),
            ("--backend", "reference", "--device", "cpu", "--dtype", "float32"),
            ("--moe-backend", "reference", "--block-size", "3", "--max-num-batched-tokens", "5", "--ignore-eos"),
        )
    ]
    assert all(run.returncode == 0 for run in outputs), outputs
    tokens = [json.loads(run.stdout)["token_ids"] for run in outputs]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("generate", "no-such-model", "--prompt-ids", "1"), ("no-such-model", "folder", "hub id")),
        (("generate", "gpt-oss-tiny", "--prompt-ids", "1"), ("gpt-oss-tiny", "--load-format dummy")),
        (("generate", "~nosuchuser/x", "--prompt-ids", "1"), ("nosuchuser",)),
        (("generate", "x" * 5000, "--prompt-ids", "1"), ("xxx",)),
        (("generate", "openai/gpt..oss", "--prompt-ids", "1"), ("openai/gpt..oss", "hub id")),
        ((*TINY[:-1], "1,x"), ("--prompt-ids", "'1,x'")),
        ((*TINY[:-1], ""), ("--prompt-ids",)),
        ((*TINY[:-1], "1,,2"), ("--prompt-ids",)),
        ((*TINY[:-1], "1_0"), ("--prompt-ids",)),
        ((*TINY[:-1], "١٢"), ("--prompt-ids",)),
        ((*TINY[:-1], "99999"), ("99999", "vocabulary")),
        ((*TINY, "--max-tokens", "999999999"), ("context",)),
        ((*TINY, "--max-tokens", "0"), ("max_tokens",)),
        ((*TINY, "--temperature", "-1"), ("temperature",)),
        ((*TINY, "--backend", "cuda_magic"), ("cuda_magic", "reference")),
        ((*TINY, "--moe-backend", "cuda_magic"), ("cuda_magic", "dequantized")),
        ((*TINY, "--device", "tpu"), ("tpu", "cpu")),
        ((*TINY, "--device", "cuda:7"), ("cuda:7", "doctor")),
        ((*TINY, "--dtype", "int8"), ("int8", "bfloat16")),
        ((*TINY, "--block-size", "0"), ("--block-size",)),
        ((*TINY, "--block-size", "1000000000000"), ("--block-size",)),
        ((*TINY, "--max-num-batched-tokens", "0"), ("max_num_batched_tokens",)),
        ((*TINY, "--hf-overrides", "{"), ("--hf-overrides", "JSON")),
        ((*TINY, "--hf-overrides", "[]"), ("--hf-overrides", "object")),
        ((*TINY, "--hf-overrides", '{"no_such_key": 1}'), ("no_such_key",)),
        ((*TINY, "--hf-overrides", '{"rms_norm_eps": NaN}'), ("--hf-overrides", "NaN")),
        ((*TINY, "--hf-overrides", "[" * 100000), ("--hf-overrides", "nested")),
        ((*TINY, "--hf-overrides", '{"sliding_window": 100000000000000000000}'), ("sliding_window", "2**31")),
        ((*TINY, "--hf-overrides", '{"eos_token_id": [99999]}'), ("99999", "vocabulary")),
        ((*TINY, "--hf-overrides", '{"vocab_size": 2000000000}'), ("GiB", "free")),
        (("generate", "gpt-oss-120b", *TINY[2:], "--device", "cpu"), ("GiB", "--backend reference")),
        (("generate", "gemma-4-26b-a4b", *TINY[2:], "--device", "cpu"), ("gemma-4-26b-a4b needs", "GiB")),
        ((*TINY, "--precision", "fats"), ("--precision 'fats'", "did you mean fast?")),
        ((*TINY, "--layer-format", "qkv"), ("--layer-format 'qkv'", "LAYER=FORMAT")),
        ((*TINY, "--layer-format", "mlp=fp8"), ("mlp=fp8", "no such layer", "qkv, o, lm_head, embed, experts")),
        ((*TINY, "--layer-format", "experts=fp8"), ("experts=fp8", "reads mxfp4", "experts=mxfp8 works")),
        ((*TINY, "--moe-activations", "nvfp4"), ("--moe-activations nvfp4", "--moe-activations bf16 works")),
        ((*TINY, "--moe-backend", "triton_w4a16"), ("--moe-backend triton_w4a16", "dequantized works")),
        ((*TINY, "--kv-cache-dtype", "int4"), ("--kv-cache-dtype 'int4'", "auto, bf16, fp8")),
        ((*TINY, "--max-model-len", "10"), ("--max-model-len 10", "3 prompt tokens and 16 new ones", "19 would do")),
        (("explain", "gpt-oss-20b", "--gpu", "rtx9090"), ("rtx9090", "rtx5090")),
        (("explain", "gpt-oss-20b", "--gpu", "h100", "--batch", "0"), ("--batch 0",)),
    ],
    ids=lambda value: " ".join(value[-2:])[:60].encode("unicode_escape").decode(),
)
def test_mistakes_are_one_clear_sentence(
    microscale: Callable[..., Run], arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    refused(microscale(*arguments), *parts)


def test_a_damaged_checkpoint_is_one_clear_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    folder = write_hf(tmp_path / "model", CASES["heads_4_2"])
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    before = sorted(tmp_path.rglob("*"))
    refused(process("generate", str(folder), "--prompt-ids", "1"), "model.safetensors")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [("serve",), ("serve", "demo"), ("quality",), ("explain", "demo", "--gpu", "h100"), ("bench", "demo"),
     ("profile", "demo"), ("generate", "demo", "--prompt-ids", "1")],
    ids=" ".join,
)  # fmt: skip
def test_an_installation_without_the_embedded_model_says_so(
    microscale: Callable[..., Run], arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "FOLDER", tmp_path)
    refused(microscale(*arguments), "The embedded model is not whole", "config.json", "install microscale again")


def test_demo_is_the_embedded_model_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository has a folder of this name."""
    held, here = tmp_path / "held", tmp_path / "here"
    for folder in (held, here / "demo"):
        folder.mkdir(parents=True)
    (held / embedded.DRAFT_HEAD.name).mkdir()
    for name in embedded.FILES:
        (held / name).touch()
    monkeypatch.setattr(embedded, "FOLDER", held)
    monkeypatch.chdir(here)
    assert hub.resolve("demo", offline=True) == held
    assert hub.resolve("./demo", offline=True) == Path("./demo")
    (held / embedded.FILES[-1]).unlink()
    with pytest.raises(BadCheckpoint, match=embedded.FILES[-1]):
        hub.resolve("demo", offline=True)


def test_a_bad_environment_is_one_clear_sentence(microscale: Callable[..., Run]) -> None:
    refused(microscale(*TINY, MICROSCALE_OFLINE="1"), "MICROSCALE_OFLINE", "MICROSCALE_OFFLINE")


def test_drafts_of_a_head_change_no_token(microscale: Callable[..., Run]) -> None:
    config = '{"method": "dflash", "model": "dflash-tiny", "num_speculative_tokens": 3}'
    assert microscale(*TINY, "--speculative-config", config).stdout == microscale(*TINY).stdout
    refused(microscale(*TINY, "--speculative-config", config.replace("dflash-tiny", "no/such")), "no/such")


def test_a_tiny_temperature_is_greedy(microscale: Callable[..., Run]) -> None:
    assert microscale(*TINY, "--temperature", "1e-40").stdout == microscale(*TINY).stdout


def test_seeds_sample_from_one_and_the_same_dummy(microscale: Callable[..., Run]) -> None:
    greedy = [microscale(*TINY, "--seed", seed).stdout for seed in ("1", "2")]
    assert greedy[0] == greedy[1]


def test_offline_asks_nobody(microscale: Callable[..., Run], tmp_path: Path) -> None:
    hub = ("generate", "some-owner/some-model", "--prompt-ids", "1")
    refused(
        microscale(*hub, MICROSCALE_OFFLINE="1", HF_HUB_CACHE=str(tmp_path)), "some-owner/some-model", "switched off"
    )


def test_a_broken_installation_is_one_clear_sentence(tmp_path: Path) -> None:
    """doctor must be able to say what is wrong when nothing can be imported."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is missing', name='torch')")
    refused(process("doctor", PYTHONPATH=str(tmp_path)), "torch", "libcudart.so.13", "install torch again")


def test_debug_shows_the_traceback() -> None:
    run = process("generate", "no-such-model", "--prompt-ids", "1", MICROSCALE_DEBUG="1")
    assert run.returncode == 1
    assert "Traceback" in run.stderr


def test_unknown_options_are_usage_errors(microscale: Callable[..., Run]) -> None:
    assert microscale(*TINY, "--no-such-option").returncode == 2
    assert microscale("no-such-command").returncode == 2


def test_doctor_and_version(microscale: Callable[..., Run]) -> None:
    run = microscale("doctor", "--json", HF_HUB_OFFLINE="1")
    report = json.loads(run.stdout)
    assert "gpt-oss-20b" in {model["model"] for model in report["models"]}
    assert run.returncode == (0 if report["ok"] else 1)
    assert {"Python", "torch", "triton", "ptxas", "Memory"} <= {f["name"] for f in report["findings"]}
    assert "torch" in microscale("doctor").stdout
    assert microscale("--version").stdout.startswith("microscale ")


def test_bench_of_a_model(microscale: Callable[..., Run]) -> None:
    run = microscale(
        "bench", "gpt-oss-tiny", "--load-format", "dummy", "--tests", "tg2", "--depth", "4", "--repeats", "1", "--json"
    )
    (row,) = json.loads(run.stdout)
    assert {"test", "batch", "depth", "tok_s", "ceiling_tok_s"} <= row.keys()
    refused(microscale("bench", "gpt-oss-tiny", "--load-format", "dummy", "--tests", "pp"), "Unknown test 'pp'")


BENCH = ("bench", "gpt-oss-tiny", "--load-format", "dummy", "--tests", "tg2", "--depth", "4", "--repeats", "1")


def test_figures_measured_as_another_card_are_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a CPU stands for the GPU that runs the card's kernels."""

    @contextmanager
    def on_an_h200(gpu: Gpu) -> Iterator[CardRun]:
        yield CardRun(bridge.card_of(gpu), bridge.card_of(known("h200")))

    monkeypatch.setattr(bridge, "as_card", on_an_h200)
    with played.played_card("gb10") as label:
        assert label == "gb10's kernels on an NVIDIA H200; not gb10's speed"
        assert played.labelled([{"us": 1.0}], label) == [{"us": 1.0, "as": label}]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_what_cannot_run_as_another_card(microscale: Callable[..., Run]) -> None:
    refused(microscale("bench", "kernels", "dense", "--as", "gb11"), "Unknown GPU 'gb11'")
    refused(microscale("bench", "kernels", "dense", "--as", "gb10"), "needs a GPU to run them on")
    refused(microscale("bench", "kernels", "dense", "--as", "gb10", "--record"), "needs a GPU to run them on")


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        (["serve", "gpt-oss-20b", "--port", "0"], ["engine", "command line"]),
        (["serve", "--help"], ["command line"]),
        (["serve", "x", "-h"], ["command line"]),
        (["explain", "serve"], ["command line"]),
        ([], ["command line"]),
    ],
)
def test_a_server_starts_its_engine_before_anything_else(
    arguments: list[str], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports torch for seconds, in which the command line and the server are imported."""
    found: list[str] = []
    monkeypatch.setattr(launching, "start_ahead", lambda: found.append("engine"))
    monkeypatch.setattr(cli, "main", lambda: found.append("command line"))
    monkeypatch.setattr(sys, "argv", ["microscale", *arguments])
    entry.main()
    assert found == order


@pytest.mark.parametrize(
    ("bound", "shown"),
    [
        ("http://127.0.0.1:8000", "at http://127.0.0.1:8000\n"),
        ("http://0.0.0.0:8000", "at http://127.0.0.1:8000 and at this machine's other addresses"),
        ("http://[::]:8000", "at http://[::1]:8000 and at this machine's other addresses"),
    ],
)
def test_the_printed_address_and_command_work(bound: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Console(file=StringIO(), width=200)
    monkeypatch.setattr(serve, "err", screen)
    serve.announce(Ready(4096, 9, (), ""), bound, "m", "", has_keys=True)
    assert isinstance(screen.file, StringIO)
    text = screen.file.getvalue()
    assert shown in text
    assert "0.0.0.0" not in text
    assert "[::]" not in text
    assert "-H 'Authorization: Bearer YOUR_KEY' -H 'Content-Type" in text
    url = "" if bound == "http://127.0.0.1:8000" or "0.0.0.0" in bound else " --url http://[::1]:8000"
    assert f"chat{url} --api-key YOUR_KEY`" in text


@pytest.mark.parametrize(
    ("typed", "on_path", "shown"),
    [
        (".venv/bin/microscale", None, ".venv/bin/microscale"),
        ("/usr/bin/microscale", "/usr/bin/microscale", "microscale"),
        ("/src/microscale/__main__.py", None, "microscale"),
    ],
)
def test_the_printed_command_is_one_that_the_shell_finds(
    typed: str, on_path: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [typed, "serve"])
    monkeypatch.setattr(shutil, "which", lambda name: on_path)
    assert serve.program() == shown
