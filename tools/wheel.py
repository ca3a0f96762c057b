"""Builds a package's wheel from a clean copy of its sources, so that nothing left by an earlier build gets in.

The same sources give the same bytes: files in the wheel carry a fixed date. ``python tools/wheel.py FOLDER`` builds
Microscale; ``python tools/wheel.py FOLDER microscale ptxproof microscale-lab`` builds these.
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
PACKAGES = {"ptxproof": "packages/ptxproof", "microscale-lab": "packages/lab"}
"""The packages next to Microscale, by the names of their distributions."""
FIRST_DATE = "315532800"
"""1980-01-01, the first day that a zip file can hold."""


def build(folder: Path, name: str = "microscale") -> Path:
    """The wheel, in ``folder``. Needs the setuptools of pyproject.toml in this environment, and no network."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as copy:
        if name in PACKAGES:
            parts = [(f"{PACKAGES[name]}/{part}", part) for part in ("pyproject.toml", "README.md", "src")]
            parts.append(("LICENSE", "LICENSE"))
        else:
            parts = [(part, part) for part in SOURCES]
        for part, place in parts:
            source, target = ROOT / part, Path(copy) / place
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, target)
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        env = os.environ | {"SOURCE_DATE_EPOCH": FIRST_DATE}
        subprocess.run([*command, "--wheel-dir", str(folder), copy], check=True, env=env)
    return max(folder.glob(f"{name.replace('-', '_')}-*.whl"), key=lambda path: path.stat().st_mtime)


if __name__ == "__main__":
    for name in sys.argv[2:] or ["microscale"]:
        print(build(Path(sys.argv[1]), name))
