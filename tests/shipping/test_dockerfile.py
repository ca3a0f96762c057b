"""The image's recipe and the composition, read: who runs it, what it may write, what it is made of."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from compat.table import CLIENTS
from microscale.cli import COMMANDS
from support.dockerfile import Instruction, instructions, read
from tools.wheel import SOURCES

ROOT = Path(__file__).parents[2]
ARGUMENTS, STAGES = read(ROOT / "Dockerfile")
BY_NAME = {stage.name: stage for stage in STAGES}


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "compose.yaml").read_text())  # type: ignore[no-any-return]


def test_the_language_is_read() -> None:
    text = 'FROM a AS b\n# a note\nRUN one \\\n    && two\nCMD ["x", "y z"]\n'
    assert instructions(text) == [
        Instruction("FROM", "a AS b"),
        Instruction("RUN", "one && two"),
        Instruction("CMD", '["x", "y z"]'),
    ]
    assert instructions(text)[2].words() == ["x", "y z"]


def test_the_last_stage_has_no_tools_of_the_build() -> None:
    last = STAGES[-1]
    assert [stage.name for stage in STAGES] == ["build", "base", "warm", "run"]
    assert (BY_NAME["base"].parent, last.parent) == (ARGUMENTS["PYTHON_IMAGE"], "base")
    copied = [i.text for stage in (BY_NAME["base"], last) for i in stage.instructions if i.name == "COPY"]
    assert all(text.startswith("--from=") for text in copied)


def test_it_runs_as_nobody_in_particular() -> None:
    assert BY_NAME["base"].last("USER").text == "10001:10001"
    for stage in (BY_NAME["warm"], BY_NAME["run"]):
        assert not [i for i in stage.instructions if i.name == "USER"]
    assert BY_NAME["run"].last("VOLUME").text == "/cache"
    # All that is written by itself goes into the volume.
    said = dict(re.findall(r"(\w+)=(\S+)", BY_NAME["base"].last("ENV").text))
    for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TRITON_CACHE_DIR"):
        assert said[name].startswith("/cache")


def test_it_starts_a_command_that_exists_and_asks_after_its_health() -> None:
    run = BY_NAME["run"]
    assert run.last("ENTRYPOINT").words() == ["microscale"]
    assert run.last("CMD").words()[0] in COMMANDS
    port = run.last("EXPOSE").text
    assert run.last("CMD").words()[-2:] == ["--port", port]
    assert f"127.0.0.1:{port}/health" in run.last("HEALTHCHECK").text


def test_all_that_is_copied_exists_and_reaches_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    sources = {
        word
        for stage in STAGES
        for i in stage.instructions
        if i.name == "COPY" and not i.text.startswith("--from")
        for word in i.words()[:-1]
    }
    for source in sources:
        assert (ROOT / source).exists()
        assert source.split("/")[0] in let_in
    assert {name.split("/")[0] for name in SOURCES} <= {source.split("/")[0] for source in sources}


def test_the_python_is_one_that_the_project_takes() -> None:
    found = re.fullmatch(r"python:(\d+)\.(\d+)-slim-bookworm", ARGUMENTS["PYTHON_IMAGE"])
    assert found
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert f">={found[1]}.{found[2]}" == least


def test_the_composition_is_for_this_machine_and_read_only() -> None:
    services = compose()["services"]
    ours = services["microscale"]
    assert ours["read_only"]
    assert ours["tmpfs"] == ["/tmp"]
    assert ours["volumes"] == ["cache:/cache"]
    assert ours["cap_drop"] == ["ALL"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert set(compose()["volumes"]) == {"cache", "webui"}
    assert set(ours["build"]["args"]) <= {
        i.text.split("=")[0] for s in STAGES for i in s.instructions if i.name == "ARG"
    }
    assert ours["command"][0] in COMMANDS


def test_open_webui_is_the_version_that_was_tried() -> None:
    tried = next(client.version for client in CLIENTS if client.name == "open-webui")
    webui = compose()["services"]["open-webui"]
    assert webui["image"] == f"openwebui/open-webui:v{tried}"
    assert webui["environment"]["OPENAI_API_BASE_URL"] == "http://microscale:8000/v1"
