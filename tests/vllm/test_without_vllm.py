"""The plug-in's door, with no vLLM behind it: it never raises, and says in one line why vLLM is left alone."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest

from microscale.integrations import vllm as plugin


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "vllm.microscale")
    return caplog


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> list[str]:
    """A vLLM of this version, and a list of what registered there."""
    vllm, experts = ModuleType("vllm"), ModuleType(plugin.EXPERTS)
    registered: list[str] = []
    vars(vllm)["__version__"] = version
    vars(experts)["register"] = lambda: registered.append("experts")
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, plugin.EXPERTS, experts)
    return registered


@pytest.mark.parametrize("version", ["0.26.0", "0.29.1", "0.32.0", "0.32.0+cpu", "0.32.1.dev7"])
def test_registers_in_the_range(version: str, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    registered = pretend(monkeypatch, version)
    plugin.register()
    plugin.register()  # each of vLLM's processes may call it more than once
    assert registered == ["experts", "experts"]
    assert not said.records


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "dev"])
def test_steps_aside_outside_the_range(
    version: str, monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture
) -> None:
    registered = pretend(monkeypatch, version)
    plugin.register()
    assert registered == []
    assert said.messages == [
        f"Microscale leaves vLLM's experts alone: this is vLLM {version}, and the plug-in is made for 0.26 to 0.32."
    ]


def test_can_be_turned_off(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    registered = pretend(monkeypatch, "0.32.0")
    monkeypatch.setenv("MICROSCALE_VLLM", "off")
    plugin.register()
    assert registered == []
    assert len(said.messages) == 1
    assert "MICROSCALE_VLLM" in said.messages[0]


def test_a_failure_is_one_warning(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ImportError("cannot import name 'RoutedExperts'")

    pretend(monkeypatch, "0.32.0")
    monkeypatch.setattr(sys.modules[plugin.EXPERTS], "register", broken)
    plugin.register()
    assert said.messages == ["Microscale leaves vLLM's experts alone: ImportError: cannot import name 'RoutedExperts'"]


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register()
    assert len(said.messages) == 1
    assert "ModuleNotFoundError" in said.messages[0]
