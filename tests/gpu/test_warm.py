"""After "ready" nothing is compiled or loaded: a new engine, an empty cache, requests of many sizes and kinds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from microscale.hardware import card_name, detect

pytestmark = pytest.mark.own("engines run in processes of their own, on the GPU as it is")
SHAPE = {"num_hidden_layers": 4}
PATIENCE_S = 500.0


def engine(model: str, precision: str, cache: Path) -> tuple[dict[str, Any], str]:
    config = {
        "model": model,
        "load_format": "dummy",
        "device": "cuda",
        "precision": precision,
        "hf_overrides": SHAPE,
        "max_model_len": 4096,
        "kernel_cache": str(cache),
    }
    command = [sys.executable, "-m", "support.warm_engine", json.dumps(config)]
    tests = str(Path(__file__).parents[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=False)
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def compiled_at_start(log: str, least: int = 20) -> int:
    found = re.search(r"(\d+) kernels are ready, (\d+) of them compiled now", log)
    assert found, log[-2000:]
    assert int(found[1]) > least
    return int(found[2])


@pytest.mark.parametrize(
    ("model", "precision"), [("gpt-oss-20b", "exact"), ("gpt-oss-20b", "fast"), ("qwen3-30b-a3b", "exact")]
)
def test_nothing_is_compiled_after_ready(model: str, precision: str, tmp_path: Path) -> None:
    first, log = engine(model, precision, tmp_path)
    late = "\n".join(re.findall(r".*after the engine was ready.*|.*when the engine was ready.*", log))
    assert (first["compiled_late"], first["loaded_late"]) == (0, 0), late
    assert first["answered"] > 150
    assert compiled_at_start(log) > 20
    again, log = engine(model, precision, tmp_path)
    assert (again["compiled_late"], again["loaded_late"]) == (0, 0)
    assert compiled_at_start(log) == 0
    print(f"{model} {precision}: ready after {first['ready_s']} s with an empty cache, {again['ready_s']} s with it")


@pytest.mark.parametrize("asked", [("--temperature", "1"), ("--max-num-batched-tokens", "64")])
def test_generate_compiles_beside_the_weights_and_nothing_later(asked: tuple[str, str], tmp_path: Path) -> None:
    prompt = ",".join(str(number) for number in range(1, 200))
    arguments = ["gpt-oss-20b", "--load-format", "dummy", "--hf-overrides", json.dumps(SHAPE), "--prompt-ids", prompt]
    tests = str(Path(__file__).parents[1])
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "support.warm_generate", "generate", *arguments, *asked]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_S, check=False)
    assert not done.returncode, done.stderr[-3000:]
    late = json.loads(done.stdout.splitlines()[-1])
    assert (late["compiled"], late["loaded"]) == (0, 0), done.stderr[-3000:]
    assert compiled_at_start(done.stderr, least=10) > 10


def test_a_cache_that_was_filled_ahead_is_used(tmp_path: Path) -> None:
    """``warm`` knows the card by its name alone, as on a machine without a GPU; then the folder moves."""
    name = card_name(detect())
    if name is None:
        pytest.skip("the card is not in the table")
    command = [sys.executable, "-m", "microscale", "warm", "gpt-oss-20b", "--gpu", name, "--json"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--kernel-cache", str(tmp_path / "built")], capture_output=True, text=True, env=env, check=True
    )
    summary = json.loads(done.stdout)
    assert summary["compiled"] == summary["kernels"] > 20
    (tmp_path / "built").rename(tmp_path / "shipped")
    started, log = engine("gpt-oss-20b", "exact", tmp_path / "shipped")
    assert compiled_at_start(log) == 0
    assert (started["compiled_late"], started["loaded_late"]) == (0, 0)
    print(f"warm: {summary['seconds']} s, {summary['cache_mb']} MB; ready after {started['ready_s']} s")
