"""The plug-in beside vLLM, both installed by pip without flags: neither is at odds with what the other needs."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
"""vLLM's CPU build wants them, in builds for another torch: `make test-vllm` takes them away."""


def broken() -> list[str]:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if not any(f"requires {name}" in line for name in LEFT_OUT)]


def test_nothing_is_at_odds() -> None:
    assert [line for line in broken() if "No broken requirements" not in line] == []


def test_the_plug_in_is_what_vllm_finds() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="microscale")
    assert entry.load().__module__ == "microscale.integrations.vllm"


def test_the_server_extra_is_not_here() -> None:
    """Else nothing would be shown: vLLM pins a grammar engine older than our server's."""
    assert tuple(map(int, importlib.metadata.version("llguidance").split(".")[:2])) < (1, 9)
