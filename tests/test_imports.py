"""What a command imports: torch takes seconds, so nobody waits for it, or for the server's packages, without need."""

from __future__ import annotations

import json
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
SERVER = {"fastapi", "starlette", "uvicorn", "uvloop", "prometheus_client", "llguidance", "tokenizers"}
NEVER = {"transformers", "matplotlib", "torch._dynamo", "torch._inductor"}
HEAVY = {"torch", "triton", "numpy", "microscale.hardware", "microscale.kernels.launch", "ptxproof"}


@pytest.mark.parametrize(
    ("command", "absent"),
    [
        ("--help", SERVER | NEVER | HEAVY | {"pydantic", "rich.progress", "microscale_lab"}),
        # The server's own process: the engine's, which it starts, needs torch. The server's packages are imported when
        # the engine knows what it will load.
        ("serve --help", SERVER | NEVER | HEAVY),
        ("bench serve --help", SERVER | NEVER | HEAVY),
        ("doctor", (SERVER - {"tokenizers"}) | NEVER),
        (
            "explain demo --gpu b200",
            (SERVER - {"msgspec"}) | NEVER | {"microscale.server", "microscale.engine.process"},
        ),
    ],
)
def test_a_command_imports_what_it_needs(command: str, absent: set[str]) -> None:
    found = subprocess.run([sys.executable, "-c", RUN, *command.split()], capture_output=True, text=True, check=True)
    assert not absent & set(json.loads(found.stdout.splitlines()[-1]))


HELP_OF_ALL = """
import contextlib, io, json, sys
from microscale.cli import COMMANDS, bench
from microscale.cli.group import load_command
for name, place in (*COMMANDS.items(), *bench.COMMANDS.items()):
    command = load_command(name, place)
    with contextlib.redirect_stdout(io.StringIO()):
        command.get_help(command.make_context(name, [], resilient_parsing=True))
    print(name, file=sys.stderr)
print(json.dumps(sorted(sys.modules)))
"""


def test_the_help_of_no_command_imports_torch() -> None:
    found = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, check=True)
    assert {"serve", "prove", "sweep"} <= set(found.stderr.split())
    assert not {"torch", "triton", "numpy", "microscale.hardware"} & set(json.loads(found.stdout))


RECORD = """
import json, sys
from microscale.planning.ops import Activations, Ops, Preference
from microscale.planning.plan import Setup
from microscale.planning.precision import make_precision
from microscale.engine.loading.warming import recorded
from microscale.hardware import known
from microscale.models.families import preset
from microscale.models.recorded import kernels_by_tokens
for model, card, precision in json.loads(sys.argv[1]):
    setup = Setup(known(card), Activations.BF16, Preference(None, None), make_precision(precision, (), "auto", "auto"))
    config = preset(model, {})
    assert len(recorded(config, setup, 16)) > 50
    assert kernels_by_tokens(config, Ops(setup.gpu, setup.activations, setup.preference, setup.precision), 16, 128)(64)
print(json.dumps(sorted(sys.modules)))
"""
RECORDED = [
    ("gpt-oss-20b", "h200", "exact"),
    ("gpt-oss-20b", "h200", "fast"),
    ("qwen3-30b-a3b", "b200", "fast"),
    ("gemma-4-26b-a4b", "gb10", "exact"),
    ("gemma-4-tiny", "rtx4090", "fast"),
    ("qwen3.6-tiny", "h200", "exact"),
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
from microscale.models.config import HeadFormats
from microscale.planning.ops import Activations, Preference
from microscale.planning.plan import Setup
from microscale.planning.precision import make_precision
from microscale.engine.loading.drafting import prepare_head
from microscale.engine.loading.warming import recorded
from microscale.hardware import known
from microscale.models.draft_heads.heads import dummy_head
from microscale.models.draft_heads.config import PRESETS, Llama3Rope
from microscale.models.dummy_weights import ShapeTensors
from microscale.models.families import mtp_of, preset
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
config = preset("qwen3.6-tiny" if name == "MTP" else "gpt-oss-20b", {})
config = config if world == 1 else config.sharded(Shard(1, world))
precision = make_precision(layer_formats=[f"embed={embed}"])
setup = Setup(known("h200"), Activations.BF16, Preference(), precision)
head = None
if name is not None:
    own = mtp_of(config).config(config) if name == "MTP" else replace(HEADS[name], shard=config.shard)
    weights = dummy_head(own, ShapeTensors())
    head = prepare_head(weights, setup, 16, HeadFormats())
found = recorded(config, setup, 16, 1024, 5 if head else 0, head)
listed = {kernel.short_name for kernel in found}
assert len(found) > 60
assert ("likeliest" in listed) == (head is not None and world == 1), listed
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world", "head", "embed"),
    [
        (2, None, "bf16"),
        (1, "EAGLE3", "bf16"),
        (1, "NVIDIA's", "mxfp8"),
        (1, "a norm of each tap", "bf16"),
        (1, "DFlash", "bf16"),
        (1, "MTP", "bf16"),
        (2, "MTP", "bf16"),
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
    assert "microscale.models.draft_heads.heads" in modules
    assert not COMPILER & modules
