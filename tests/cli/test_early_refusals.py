"""A wrong value is refused before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

RUN = """
import json, sys
from microscale import cli
sys.argv = ["microscale", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as end:
    print(json.dumps([end.code, "torch" in sys.modules]))
"""


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        ("serve demo --precision fats", 1, "did you mean fast?"),
        ("serve demo --device tpu", 1, "Unknown device 'tpu'"),
        ("serve demo --gpu-memory-utilization 7", 2, "--gpu-memory-utilization"),
        ("serve demo --speculative-config x", 1, "--speculative-config"),
        ("serve demo --hf-overrides x", 1, "--hf-overrides"),
        ("chat demo --precision fats", 1, "did you mean fast?"),
        ("run demo hi --device tpu", 1, "Unknown device 'tpu'"),
        ("explain demo --layer-format qkv", 1, "LAYER=FORMAT"),
        ("bench demo --tests xx", 1, "Unknown test 'xx'"),
        ("bench demo --kv-cache-dtype int4", 1, "--kv-cache-dtype 'int4' is unknown"),
        ("bench demo --hf-overrides x", 1, "--hf-overrides"),
        ("generate demo --prompt-ids 1 --threads 5000", 2, "--threads"),
        ("generate demo --prompt-ids x", 1, "--prompt-ids"),
    ],
)
def test_a_wrong_value_is_refused_before_torch_is_imported(arguments: str, status: int, message: str) -> None:
    run = subprocess.run([sys.executable, "-c", RUN, *arguments.split()], capture_output=True, text=True, check=False)
    assert json.loads(run.stdout) == [status, False]
    assert message in run.stderr
