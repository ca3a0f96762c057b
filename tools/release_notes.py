"""A release's notes: the changelog's section of its version. Run as ``python tools/release_notes.py v0.1.0``.

Refuses when the tag, ``version.py`` and the changelog do not agree, so that nothing is released by mistake.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION_FILE = ROOT / "src" / "microscale" / "version.py"


def version() -> str:
    """As the package has it, without importing the package."""
    found = re.search(r'__version__ = "([^"]+)"', VERSION_FILE.read_text())
    if found is None:
        raise ValueError(f"{VERSION_FILE.name} has no version")
    return found[1]


def notes(changelog: str, tag: str, current: str) -> str:
    """The text below ``## VERSION``, which may be followed by a date."""
    if tag != f"v{current}":
        raise ValueError(f"the tag is {tag}, and version.py says {current}: it should be v{current}")
    for section in re.split(r"(?m)^## ", changelog)[1:]:
        heading, _, text = section.partition("\n")
        if re.fullmatch(rf"{re.escape(current)}(\s.*)?", heading) and text.strip():
            return text.strip() + "\n"
    raise ValueError(f"CHANGELOG.md has no section `## {current}`")


def main() -> None:
    try:
        print(notes((ROOT / "CHANGELOG.md").read_text(), sys.argv[1], version()), end="")
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
