"""What the packages may import, and the facts that two of them hold."""

from __future__ import annotations

import ast
from pathlib import Path

from microscale.hardware import FAMILY_OF_SM, WARP_SIZE
from ptxproof import targets

ROOT = Path(__file__).parents[2]


def imported_by(folder: Path) -> set[str]:
    """The packages that the modules of a folder import."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").split(".")[0])
    return found


def test_imports_point_down() -> None:
    assert not {"microscale", "microscale_lab"} & imported_by(ROOT / "packages" / "ptxproof")
    assert not {"microscale_lab", "ptxproof"} & imported_by(ROOT / "src" / "microscale")


def test_both_tables_of_shared_memory_agree() -> None:
    ours = {sm: family.shared_per_block for sm, family in FAMILY_OF_SM.items()}
    assert (ours, WARP_SIZE) == (targets.SHARED_PER_BLOCK, targets.WARP_SIZE)
