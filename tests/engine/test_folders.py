"""The engine's folders: who imports whom, and that an engine runs where the server's packages are not installed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import microscale.engine

ENGINE = Path(microscale.engine.__file__).parent
BENCH = ENGINE.parent / "bench"
OF_THE_SERVER = ("zmq", "fastapi", "pydantic", "uvicorn", "prometheus_client", "llguidance")
LOOSE = ("loading", "process", "client", "protocol", "ranks", "engine", "generate")
"""What the engine's loose modules do not import."""
MAY_NOT_IMPORT = {
    "loading": ("process", "client", "protocol", "generate"),
    "ranks": ("client", "generate"),
    "protocol": ("process", "client", "loading", "ranks"),
    "process": ("client",),
    "client": ("process", "loading", "ranks"),
    **{path.name: LOOSE for path in ENGINE.glob("*.py") if path.stem not in ("__init__", "engine", "generate")},
}
"""Folder or module → parts of the engine that it does not import. Nothing else imports ``process``."""


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("path", sorted(ENGINE.rglob("*.py")), ids=lambda path: str(path.relative_to(ENGINE)))
def test_imports_point_down(path: Path) -> None:
    folder = path.relative_to(ENGINE).parts[0]
    hidden = MAY_NOT_IMPORT.get(folder, ("process",))
    prefixes = tuple(f"microscale.engine.{name}." for name in hidden)
    wrong = [name for name in imported(path) if f"{name}.".startswith(prefixes)]
    assert not wrong, f"{path.relative_to(ENGINE)} imports {wrong}"


def modules(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        yield ".".join(("microscale", *path.relative_to(ENGINE.parent).with_suffix("").parts)).removesuffix(".__init__")


WITHOUT = """
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError("No module named " + repr(name))

sys.meta_path.insert(0, Missing())
for name in {names}:
    importlib.import_module(name)
{then}
"""


def run_without(missing: tuple[str, ...], names: list[str], then: str = "") -> str:
    code = WITHOUT.format(missing=set(missing), names=names, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_engine_and_benchmarks_run_without_the_servers_packages() -> None:
    """A machine that only measures kernels and steps has torch and Triton, and nothing of the server's."""
    talks = ("microscale.engine.process", "microscale.engine.ranks")
    names = [name for name in modules(ENGINE) if not name.startswith(talks)]
    assert len(names) > 15
    then = """
from microscale.engine.generate import Generation
from microscale.engine.loading.load import load
from microscale.engine.config import EngineConfig
from microscale.engine.loading.prepare import prepare
from microscale.engine.sampling_params import SamplingParams
model = load(prepare(EngineConfig("gpt-oss-tiny", load_format="dummy", device="cpu")))
print(len(Generation(model, [[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True)).run()[0].token_ids))
"""
    assert run_without(OF_THE_SERVER, [*names, *modules(BENCH)], then).split() == ["4"]


def test_the_process_greets_without_torch() -> None:
    """Versions are compared, and nonsense is refused, before torch takes its seconds."""
    names = ("process.__main__", "process.connection", "process.loop", "protocol.messages", "client.client")
    run_without(("torch",), [f"microscale.engine.{name}" for name in names])
