"""The image's steps, one by one, in a plain folder as the root; then what it starts, as its user, on a read-only root.

For machines without a builder: ``make test-image``. What needs Debian's packages is not run; the programs that it would
install must be on this machine instead.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from support.dockerfile import Instruction, Stage, expand, read
from support.plain_root import PlainRoot, pip_settings, possible

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not possible(), reason="it takes root, and the right to mount in a namespace of one's own"),
]
ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "TORCH_BUILD": "",
    "WARM_GPUS": "rtx5090",
    "WARM_MODELS": "demo",
    "WARM_OPTIONS": "--max-num-batched-tokens 1",
}
BASE_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
PROXY = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
NETWORK = PROXY | pip_settings()
PATIENCE_S = 600.0
WRITABLE = "/cache"


@dataclass
class Built:
    """One stage so far."""

    root: PlainRoot
    env: dict[str, str] = field(default_factory=lambda: {"PATH": BASE_PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "0:0"

    def path(self, inside: str) -> Path:
        return self.root.folder / os.path.join(self.folder, inside).lstrip("/")


class Builder:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.stages: dict[str, Built] = {}
        self.left_out: list[str] = []

    def build(self, stage: Stage) -> None:
        root = PlainRoot(self.base / stage.name)
        parent = self.stages.get(stage.parent)
        if parent is None:
            root.make()
            self.stages[stage.name] = Built(root)
        else:
            link(parent.root.folder, root.folder)
            self.stages[stage.name] = Built(root, dict(parent.env), {}, parent.folder, parent.user)
        for instruction in stage.instructions:
            self.step(self.stages[stage.name], instruction)

    def step(self, built: Built, instruction: Instruction) -> None:
        match instruction.name:
            case "ARG":
                name, _, value = instruction.text.partition("=")
                built.arguments[name] = ARGUMENTS.get(name, value.strip('"'))
            case "ENV":
                text = expand(instruction.text, built.env)
                built.env |= dict(word.split("=", 1) for word in shlex.split(text))
            case "WORKDIR":
                built.folder = instruction.text
                built.path(".").mkdir(parents=True, exist_ok=True)
            case "USER":
                built.user = instruction.text
            case "COPY":
                self.copy(built, instruction.words())
            case "RUN":
                self.run(built, instruction.text)

    def copy(self, built: Built, words: list[str]) -> None:
        options = dict(word[2:].split("=", 1) for word in words if word.startswith("--"))
        *sources, target = [word for word in words if not word.startswith("--")]
        to = built.path(target)
        for source in sources:
            if "from" in options:
                shutil.rmtree(to, ignore_errors=True)
                link(self.stages[options["from"]].path(source), to)
                continue
            place = to / Path(source).name if target.endswith("/") else to
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(ROOT / source, place)
        if "chown" in options:
            subprocess.run(["chown", "-R", options["chown"], str(to)], check=True)

    def run(self, built: Built, text: str) -> None:
        if text.startswith("apt-get "):
            self.left_out.append(text)
            return
        env = built.env | built.arguments | NETWORK
        command = built.root.command(["sh", "-c", text], env, folder=built.folder, user=built.user)
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, f"RUN {text}\n{(done.stdout + done.stderr)[-4000:]}"


def link(source: Path, target: Path) -> None:
    """A copy that takes no room."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-al", str(source), str(target)], check=True)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Builder, Stage]:
    base = tmp_path_factory.mktemp("image")
    # The image's user must come through to its root.
    for folder in (base, *base.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    builder = Builder(base)
    stages = read(ROOT / "Dockerfile")[1]
    for stage in stages:
        builder.build(stage)
    return builder, stages[-1]


def test_what_is_not_run_is_there(image: tuple[Builder, Stage]) -> None:
    (text,) = image[0].left_out
    assert "gcc" in text
    assert shutil.which("gcc")


def test_kernels_were_compiled_for_the_card_and_belong_to_the_user(image: tuple[Builder, Stage]) -> None:
    built = image[0].stages["run"]
    compiled = list(built.path("/cache/kernels").rglob("*.cubin"))
    assert len(compiled) > 10
    owner = built.path("/cache").stat()
    assert f"{owner.st_uid}:{owner.st_gid}" == built.user


def written(folder: Path) -> Mapping[str, float]:
    return {str(path): path.lstat().st_mtime for path in folder.rglob("*") if not path.is_relative_to(folder / "cache")}


def test_it_serves_as_its_user_on_a_read_only_root(image: tuple[Builder, Stage], tmp_path: Path) -> None:
    built, stage = image[0].stages["run"], image[1]
    before = written(built.root.folder)

    def start(argv: list[str]) -> list[str]:
        return built.root.command(argv, built.env, folder=built.folder, user=built.user, writable=[WRITABLE])

    refused = subprocess.run(
        start(["sh", "-c", "touch /opt/microscale/x"]), capture_output=True, text=True, check=False
    )
    assert "Read-only file system" in refused.stderr
    whoami = subprocess.run(start(["id", "-un"]), capture_output=True, text=True, check=True)
    assert whoami.stdout.strip() == "microscale"

    log = tmp_path / "log"
    with log.open("w") as out:
        argv = [*stage.last("ENTRYPOINT").words(), *stage.last("CMD").words()]
        process = subprocess.Popen(start(argv), stdout=out, stderr=subprocess.STDOUT)
    check = json.loads(stage.last("HEALTHCHECK").text.partition("CMD ")[2])
    try:
        deadline = time.monotonic() + PATIENCE_S
        while subprocess.run(start(check), capture_output=True, check=False).returncode:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.5)
        body = json.dumps({"messages": [{"role": "user", "content": "What is 247 + 385?"}], "temperature": 0}).encode()
        address = "http://127.0.0.1:8000/v1/chat/completions"
        request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            assert "632" in json.load(answer)["choices"][0]["message"]["content"]
        process.send_signal(getattr(signal, stage.last("STOPSIGNAL").text))
        assert process.wait(60) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
    assert written(built.root.folder) == before
