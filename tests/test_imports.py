"""What a command imports: torch takes seconds, so nobody waits for it, or for the server's packages, without need."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

RUN = """
import contextlib, io, json, sys
from microscale.__main__ import main
sys.argv = ["microscale", *sys.argv[1:]]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
print(json.dumps(sorted(sys.modules)))
"""
SERVER = {"fastapi", "starlette", "uvicorn", "uvloop", "prometheus_client", "llguidance", "tokenizers", "msgspec"}
NEVER = {"transformers", "matplotlib", "torch._dynamo", "torch._inductor"}
LATE = {"torch._C", "triton.runtime", "numpy.linalg", "microscale.kernels.keys"}
"""Of what is imported on first use: stand-ins have the names of packages and of our modules of kernels."""
PLANS = [
    "gpt-oss-20b --gpu gb10",
    "gpt-oss-120b --gpu gb10 --speculative eagle3 --tensor-parallel-size 2",
    "gpt-oss-120b --gpu h200 --speculative ngram --precision balanced --json",
    "gemma-4-26b-a4b --gpu rtx5090 --precision fast",
    "qwen3-30b-a3b --gpu a100",
    "demo --gpu b200",
]


@pytest.mark.parametrize(
    ("command", "absent", "most"),
    [
        # The most modules that were seen, and a tenth. Of torch alone there are a thousand.
        (
            "--help",
            SERVER | NEVER | {"torch", "triton", "numpy", "pydantic", "rich.progress", "microscale.hardware"},
            360,
        ),
        # The server's own process: the engine's, which it starts, needs torch. The server's packages come when that
        # was told what it will load.
        (
            "serve --help",
            (SERVER - {"msgspec"}) | NEVER | {"torch", "triton", "numpy", "microscale.kernels.launch"},
            575,
        ),
        # Nor does who measures one: the server's packages are the business of the process that is measured.
        ("bench serve --help", SERVER | NEVER, 1920),
        ("doctor", SERVER | NEVER | {"triton", "safetensors", "microscale.kernels", "microscale.models"}, 1420),
        *[
            (f"explain {plan}", SERVER | NEVER | LATE | {"microscale.server", "microscale.engine.process"}, 625)
            for plan in PLANS
        ],
    ],
)
def test_a_command_imports_what_it_needs(command: str, absent: set[str], most: int) -> None:
    found = subprocess.run([sys.executable, "-c", RUN, *command.split()], capture_output=True, text=True, check=True)
    counted = os.environ.get("COVERAGE_PROCESS_START") or os.environ.get("COVERAGE_PROCESS_CONFIG")
    most += 40 if counted else 0  # it imports itself and what it needs
    modules = set(json.loads(found.stdout.splitlines()[-1]))
    assert len(modules) > 200
    assert not absent & modules
    assert len(modules) <= most


RECORD = """
import json, sys
from microscale.backends.ops import Activations, Ops, Preference
from microscale.backends.plan import Setup
from microscale.backends.precision import make_precision
from microscale.engine.loading.warming import recorded
from microscale.hardware import known
from microscale.models.families import preset
from microscale.models.recorded import kernels_by_tokens
for model, card, precision in json.loads(sys.argv[1]):
    setup = Setup(known(card), Activations.BF16, Preference(None, None), make_precision(precision, (), "auto", "auto"))
    config = preset(model, {})
    assert len(recorded(config, setup, 16)) > 50
    assert kernels_by_tokens(config, Ops(setup.gpu, setup.activations, setup.preference, setup.precision))(64)
print(json.dumps(sorted(sys.modules)))
"""
RECORDED = [
    ("gpt-oss-20b", "h200", "exact"),
    ("gpt-oss-20b", "h200", "fast"),
    ("qwen3-30b-a3b", "b200", "fast"),
    ("gemma-4-26b-a4b", "gb10", "exact"),
    ("gemma-4-tiny", "rtx4090", "fast"),
]


COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}


def test_listing_kernels_imports_no_compiler_of_torch() -> None:
    """It happens at every start, and the thread that loads the weights waits for the interpreter meanwhile."""
    command = [sys.executable, "-c", RECORD, json.dumps(RECORDED)]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = set(json.loads(found.stdout.splitlines()[-1]))
    assert "torch" in modules
    assert not COMPILER & modules


RECORD_HEAD = """
import json, sys
from dataclasses import replace
from microscale.backends.head_formats import HeadFormats
from microscale.backends.ops import Activations, Preference
from microscale.backends.plan import Setup
from microscale.backends.precision import make_precision
from microscale.engine.loading.drafting import prepare_head
from microscale.engine.loading.warming import recorded
from microscale.hardware import known
from microscale.models.draft_heads.heads import dummy_head
from microscale.models.draft_heads.presets import PRESETS
from microscale.models.draft_heads.rope import Llama3Rope
from microscale.models.dummy_weights import ShapeTensors
from microscale.models.families import preset
from microscale.parallel.sharding import Shard

EAGLE3, NVIDIA = PRESETS["gpt-oss-20b-eagle3"], PRESETS["gpt-oss-120b-eagle3-v3"]
HEADS = {
    "EAGLE3": EAGLE3,
    "NVIDIA's": replace(NVIDIA, reads=EAGLE3.reads),
    "a norm of each tap": replace(
        EAGLE3,
        layer=replace(EAGLE3.layer, rope=Llama3Rope(5e5, 8.0, 1.0, 4.0, 8192)),
        norm_of_each_tap=True,
        norm_before_residual=True,
        own_embedding=True,
    ),
    "DFlash": replace(
        PRESETS["dflash-tiny"], layer=replace(EAGLE3.layer, head_norms=True), reads=EAGLE3.reads, mask_token=200000
    ),
}
world, name, embed = json.loads(sys.argv[1])
config = preset("gpt-oss-20b", {})
config = config if world == 1 else config.sharded(Shard(1, world))
precision = make_precision(layer_formats=[f"embed={embed}"])
setup = Setup(known("h200"), Activations.BF16, Preference(), precision)
head = None
if name is not None:
    weights = dummy_head(replace(HEADS[name], shard=config.shard), ShapeTensors())
    head = prepare_head(weights, setup, 16, HeadFormats())
found = recorded(config, setup, 16, 1024, 5 if head else 0, head)
listed = {kernel.short_name for kernel in found}
assert len(found) > 60
assert ("likeliest" in listed) == (head is not None and world == 1), listed
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    ("world", "head", "embed"),
    [
        (2, None, "bf16"),
        (1, "EAGLE3", "bf16"),
        (1, "NVIDIA's", "mxfp8"),
        (1, "a norm of each tap", "bf16"),
        (1, "DFlash", "bf16"),
        (2, "EAGLE3", "bf16"),
        (4, "DFlash", "bf16"),
    ],
)
def test_nor_does_listing_those_of_a_draft_head_or_of_a_rank(world: int, head: str | None, embed: str) -> None:
    """Each in a process of its own: what one imports, the next would not."""
    command = [sys.executable, "-c", RECORD_HEAD, json.dumps([world, head, embed])]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    modules = set(json.loads(found.stdout.splitlines()[-1]))
    assert "microscale.models.draft_heads.recorded" in modules
    assert not COMPILER & modules
