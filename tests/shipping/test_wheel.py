"""What is in the wheel: the package, the embedded model, the web page and the tuned files, and nothing else."""

from __future__ import annotations

import re
import socket
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from microscale.version import __version__
from tools.wheel import PACKAGES, build

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"
DATA = (
    "demo_model/",
    "server/web/static/",
    "hardware/tuned/",
    "hardware/measured/",
    "hardware/speeds_of_others",
    "hardware/drafts_of_others",
    "hardware/draft_costs.json",
    "engine/predictions.json",
    "engine/quality_costs.json",
    "py.typed",
)
"""What is no Python and belongs to the package."""
MAX_MB = 30.0
TEXT = (".py", ".json", ".js", ".css", ".html", ".svg", ".txt")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(tmp_path_factory.mktemp("wheel")))


def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"microscale-{__version__}.dist-info/METADATA").decode())


def test_it_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    package = {str(path.relative_to(SRC)) for path in (SRC / "microscale").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    info = f"microscale-{__version__}.dist-info/"
    about = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    assert set(wheel.namelist()) == package | {info + name for name in about}


def test_every_file_has_a_reason_to_be_there(wheel: zipfile.ZipFile) -> None:
    ours = [name.removeprefix("microscale/") for name in wheel.namelist() if name.startswith("microscale/")]
    strange = [name for name in ours if not name.endswith(".py") and not name.startswith(DATA)]
    assert not strange
    for folder in DATA:
        assert any(name.startswith(folder) for name in ours), folder
    for needed in ("demo_model/config.json", "demo_model/tokenizer.json", "server/web/static/index.html"):
        assert needed in ours
    weights = [name for name in ours if name.endswith(".safetensors")]
    assert len(weights) == 3
    assert "demo_model/draft_head/model.safetensors" in weights
    assert Path(wheel.filename or "").stat().st_size < MAX_MB * 1e6


def test_it_names_no_machine(wheel: zipfile.ZipFile) -> None:
    """Where it was built is nobody's business."""
    private = {str(ROOT), str(Path.home()), *filter(lambda name: len(name) > 6, [socket.gethostname()])} - {"/"}
    for name in wheel.namelist():
        if name.endswith((*TEXT, "METADATA", "RECORD", "WHEEL")):
            text = wheel.read(name).decode()
            assert not [word for word in private if re.search(rf"(?<!\w){re.escape(word)}\b", text)], name


def test_extras_and_scripts(wheel: zipfile.ZipFile) -> None:
    said = metadata(wheel)
    assert said["Name"] == "microscale"
    assert set(said.get_all("Provides-Extra") or ()) == {"lab", "ray", "dev"}
    lines = [line for line in said.get_all("Requires-Dist") or () if "extra ==" not in line]
    required = {Requirement(line).name for line in lines}
    assert required >= {"torch", "fastapi", "uvicorn", "llguidance", "tokenizers"}, "a wheel without extras serves"
    scripts = wheel.read(f"microscale-{__version__}.dist-info/entry_points.txt").decode()
    assert "microscale = microscale.__main__:main" in scripts
    assert "[vllm.general_plugins]" in scripts


def test_the_same_sources_give_the_same_bytes(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    assert build(tmp_path).read_bytes() == Path(wheel.filename or "").read_bytes()


@pytest.mark.parametrize(("name", "module"), [("ptxproof", "ptxproof"), ("microscale-lab", "microscale_lab")])
def test_the_packages_next_to_it_are_whole_and_of_the_same_version(name: str, module: str, tmp_path: Path) -> None:
    folder = ROOT / PACKAGES[name] / "src"
    expected = {
        str(path.relative_to(folder))
        for path in (folder / module).rglob("*")
        if path.suffix in (".py", ".typed", ".json")
    }
    names = zipfile.ZipFile(build(tmp_path, name)).namelist()
    assert {path for path in names if path.startswith(f"{module}/")} == expected
    assert f"{module}-{__version__}.dist-info/licenses/LICENSE" in names
