"""The unit for systemd: systemd has no complaint, and what it starts is a command that exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from microscale.settings import load
from support.doc_commands import ROOT, complaint

UNIT = (ROOT / "packaging/microscale.service").read_text()


def value(name: str) -> str:
    (found,) = re.findall(rf"(?m)^{name}=(.*)$", UNIT)
    return str(found)


def test_what_it_starts_exists() -> None:
    (arguments,) = re.findall(r"(?m)^Environment=SERVE_ARGS=(.*)$", UNIT)
    assert complaint(value("ExecStart").replace("$SERVE_ARGS", arguments)) is None
    assert complaint(value("ExecStart").replace("$SERVE_ARGS", "--no-such-option")) is not None
    # Its own variables are none that the program would take for a typing mistake.
    names = dict(re.findall(r"(?m)^Environment=(\w+)=(.*)$", UNIT))
    load(dict.fromkeys(names, "x"))


def test_open_requests_have_their_time() -> None:
    assert int(value("TimeoutStopSec")) > 30
    assert "`packaging/microscale.service`" in (ROOT / "docs/using.md").read_text()


def test_systemd_has_no_complaint(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("this machine has no systemd-analyze")
    unit = tmp_path / "microscale.service"
    # The program need not be installed where a user will have it.
    unit.write_text(UNIT.replace("/opt/microscale/bin/microscale", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    # What it says of other units, which this machine may have, is not ours.
    said = [line for line in (done.stdout + done.stderr).splitlines() if "microscale" in line]
    assert done.returncode == 0 or not said, said
    assert not said
