"""The plug-in next to vLLM, installed with ``--no-deps``: vLLM has what the plug-in needs, and keeps its versions."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

from microscale import doctor

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
"""vLLM's CPU build wants them, in builds for another torch: `make test-vllm` takes them away."""
CORE_NEEDS = {*doctor.REQUIRED, "typer", "rich"}


def broken() -> list[str]:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "No broken requirements" not in line]
    return [line for line in lines if not any(f"requires {name}" in line for name in LEFT_OUT)]


def test_nothing_that_vllm_or_the_plug_in_needs_is_missing() -> None:
    """Only Microscale's server wants more, or newer packages, than are here."""
    for line in broken():
        assert line.startswith("microscale "), line
        assert not any(f" {name}" in line for name in CORE_NEEDS), line


def test_the_plug_in_is_what_vllm_finds() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="microscale")
    assert entry.load().__module__ == "microscale.integrations.vllm"


def test_vllm_keeps_its_grammar_engine() -> None:
    """It pins one that is older than the server's."""
    assert tuple(map(int, importlib.metadata.version("llguidance").split(".")[:2])) < (1, 9)
