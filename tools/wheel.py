"""Builds the wheel from a clean copy of what belongs into it, so that nothing left by an earlier build gets in.

The same sources give the same bytes: files in the wheel carry a fixed date. Run as ``python tools/wheel.py FOLDER``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src/microscale")
FIRST_DATE = "315532800"
"""1980-01-01, the first day that a zip file can hold."""


def build(folder: Path) -> Path:
    """The wheel, in ``folder``. Needs the setuptools of pyproject.toml in this environment, and no network."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as copy:
        for name in SOURCES:
            source, target = ROOT / name, Path(copy) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        env = os.environ | {"SOURCE_DATE_EPOCH": FIRST_DATE}
        subprocess.run([*command, "--wheel-dir", str(folder), copy], check=True, env=env)
    return max(folder.glob("microscale-*.whl"), key=lambda path: path.stat().st_mtime)


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
