"""The core without the server's packages, as next to vLLM: it works, and other commands say what is missing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from microscale import doctor
from support.readme import shown_by

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "microscale"
CORE = ["planning", "bench", "engine", "explain", "formats", "hardware", "integrations", "kernels"]
CORE += ["models", "doctor.py", "errors.py", "settings.py", "version.py", "__init__.py", "__main__.py"]
CORE_NEEDS = {*doctor.REQUIRED, "typer", "rich"}
"""Dependencies that vLLM has too. The core imports no others."""
MODULES = {
    "oss-harmony": "openai_harmony",
    "prometheus-client": "prometheus_client",
    "huggingface-hub": "huggingface_hub",
}
"""Distributions whose module has another name."""
LAZY = {("engine/grammar.py", "llguidance")}
"""Imported with the first grammar, which only a server sends."""
OTHER_ENGINES = {"vllm": "integrations/vllm", "ray": "integrations/ray_serve"}
"""Package → the files that may import it. Who has it has installed it: vLLM's environment, the extra ``ray``."""
OF_THE_EXTRA_RAY = "integrations/ray_serve"
"""Files with this beginning need the extra, which brings the server's packages."""
BROUGHT = {"pydantic", "pydantic_core", "jinja2"}
"""Typer and torch bring these, so the core may meet them."""
BLOCKED = """
import sys
sys.modules.update(dict.fromkeys({absent!r}))  # not to be found, and not to be imported
sys.argv = ["microscale", *sys.argv[1:]]
from microscale.__main__ import main
main()
"""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


def modules(lines: list[str]) -> set[str]:
    names = [Requirement(line).name for line in lines]
    return {MODULES.get(name, name) for name in names}


def server_modules() -> set[str]:
    # Starlette and pydantic_core come with FastAPI and pydantic.
    lines = [line for line in project()["dependencies"] if Requirement(line).name not in CORE_NEEDS]
    return modules(lines) | {"starlette", "pydantic_core"}


def imported(path: Path) -> set[str]:
    """Names of the packages."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def third_party(path: Path) -> set[str]:
    return imported(path) - set(sys.stdlib_module_names) - {"microscale", *OTHER_ENGINES}


def test_the_core_imports_no_package_of_the_server() -> None:
    core = {MODULES.get(name, name) for name in CORE_NEEDS}
    files = [path for name in CORE for path in ([SRC / name] if name.endswith(".py") else (SRC / name).rglob("*.py"))]
    assert len(files) > 200
    for path in files:
        name = str(path.relative_to(SRC))
        if name.startswith(OF_THE_EXTRA_RAY):
            continue
        assert not {(name, module) for module in third_party(path) - core} - LAZY


@pytest.mark.parametrize("package", OTHER_ENGINES)
def test_another_engine_is_imported_by_its_own_files_alone(package: str) -> None:
    found = {str(path.relative_to(SRC)) for path in SRC.rglob("*.py") if package in imported(path)}
    assert found
    assert all(name.startswith(OTHER_ENGINES[package]) for name in found), found


def test_every_package_that_is_imported_is_a_dependency() -> None:
    declared = modules(project()["dependencies"]) | server_modules()
    used = {module for path in SRC.rglob("*.py") for module in third_party(path)}
    assert used <= declared
    assert declared - used <= {"httptools"}, "uvicorn takes it by its name"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(absent=server_modules() - BROUGHT)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.nightly  # the tests of imports above find by day what would break them
@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        ("explain gpt-oss-20b --gpu gb10", shown_by("explain")),
        ("doctor", "Microscale"),
        ("generate demo --prompt-ids 1,2,3 --max-tokens 4 --device cpu", r"(?m)^\d+(,\d+){3}$"),
    ],
)
def test_commands_of_the_core_work_without_the_server(arguments: str, shows: str) -> None:
    done = run(*arguments.split())
    assert done.returncode == 0, done.stderr
    assert re.search(shows, done.stdout)


@pytest.mark.parametrize("command", ["serve"])
def test_commands_of_the_server_say_how_to_get_them(command: str) -> None:
    done = run(command)
    assert done.returncode == 1
    assert re.fullmatch(r"error: this command needs the package \w+, .* with its dependencies\n", done.stderr)


def test_doctor_knows_the_versions_of_pyproject() -> None:
    """Two lists that must agree: the doctor also runs where Microscale is not installed."""
    wanted = [Requirement(line) for line in project()["dependencies"]]
    least = {
        w.name: tuple(map(int, each.version.split(".")))
        for w in wanted
        for each in w.specifier
        if each.operator == ">="
    }
    assert {name: least[name] for name in doctor.REQUIRED} == doctor.REQUIRED


def test_doctor_reads_what_the_wheel_says() -> None:
    lines = project()["dependencies"]
    extras = [f'{line}; extra == "dev"' for line in project()["optional-dependencies"]["dev"]]
    found = [match[1] for line in [*lines, *extras] if (match := doctor.DEPENDENCY.match(line))]
    assert found == [Requirement(line).name for line in lines]
