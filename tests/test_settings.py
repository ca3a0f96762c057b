"""The environment: read in one place, strictly."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from microscale import settings
from microscale.errors import BadSetting


def test_defaults() -> None:
    value = settings.load({"XDG_CACHE_HOME": "/cache"})
    assert value == settings.Settings(Path("/cache/microscale"), offline=False, debug=False, vllm=True)


def test_values() -> None:
    value = settings.load({"MICROSCALE_CACHE_DIR": "/x", "MICROSCALE_OFFLINE": "yes", "MICROSCALE_DEBUG": "1"})
    assert value == settings.Settings(Path("/x"), offline=True, debug=True, vllm=True)
    assert not settings.load({"MICROSCALE_VLLM": "off"}).vllm
    assert settings.load({"HF_HUB_OFFLINE": "1"}).offline


def test_a_value_that_is_no_flag_is_refused() -> None:
    with pytest.raises(BadSetting, match="MICROSCALE_DEBUG='perhaps'"):
        settings.load({"MICROSCALE_DEBUG": "perhaps"})


def test_a_variable_that_nobody_knows_is_refused() -> None:
    with pytest.raises(BadSetting, match="MICROSCALE_CACHE_DIRECTORY"):
        settings.load({"MICROSCALE_CACHE_DIRECTORY": "/x"})


def test_a_user_without_a_home_has_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    assert settings.load({}).cache_dir == Path(tempfile.gettempdir()) / "microscale"


def test_threads_do_not_spin_for_long_unless_the_user_says_so() -> None:
    theirs = [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}]
    for environment in theirs:
        settings.limit_spinning(environment)
    assert theirs == [{"GOMP_SPINCOUNT": "1000"}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}]


LIMITED = """
import resource
from microscale.settings import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, {given})
allow_connections()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("given", "found"), [((100, 700), (700, 700)), ((700, 700), (700, 700))])
def test_the_soft_limit_is_raised_to_the_hard_one(given: tuple[int, int], found: tuple[int, int]) -> None:
    script = LIMITED.format(given=given)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(found)
