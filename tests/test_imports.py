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
SERVER = {"fastapi", "starlette", "uvicorn", "uvloop", "prometheus_client", "llguidance", "tokenizers", "msgspec"}
NEVER = {"transformers", "matplotlib", "torch._dynamo", "torch._inductor"}


@pytest.mark.parametrize(
    ("command", "absent", "most"),
    [
        # The most modules that were seen, and a tenth. Of torch alone there are a thousand.
        ("--help", SERVER | NEVER | {"torch", "triton", "numpy", "pydantic", "microscale.hardware"}, 380),
        # The server's own process: the engine's, which it starts, needs torch.
        ("serve --help", NEVER | {"torch", "triton", "numpy", "microscale.kernels.launch"}, 1000),
        # Nor does who measures one: the server's packages are the business of the process that is measured.
        ("bench serve --help", SERVER | NEVER, 1920),
        ("doctor", SERVER | NEVER | {"triton", "safetensors", "microscale.kernels", "microscale.models"}, 1420),
        ("explain gpt-oss-20b --gpu gb10", SERVER | NEVER | {"microscale.server", "microscale.engine.process"}, 1730),
    ],
)
def test_a_command_imports_what_it_needs(command: str, absent: set[str], most: int) -> None:
    found = subprocess.run([sys.executable, "-c", RUN, *command.split()], capture_output=True, text=True, check=True)
    modules = set(json.loads(found.stdout.splitlines()[-1]))
    assert len(modules) > 200
    assert not absent & modules
    assert len(modules) <= most
