"""Copies the pages of the repository to where MkDocs builds the site from, with their links adjusted.

``python -m tools.docs.assemble build/docs``. Needs the standard library only, so that the site builds without torch.
Readers on GitHub see the same pages; nothing that this writes is committed.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tools.docs.links import DOCS, OUTSIDE, ROOT, for_site, place, section

GLOSSARY = "glossary.md"
HOME = "---\ntitle: Microscale\nhide: [navigation]\n---\n\n"


def sources() -> list[str]:
    """Every page of the repository that goes on the site."""
    inside = sorted(str(path.relative_to(ROOT)) for path in (ROOT / DOCS).rglob("*.md"))
    return [*OUTSIDE, *inside]


def page(source: str) -> str:
    """A page as the site shows it."""
    text = for_site(source, (ROOT / source).read_text())
    return HOME + text if place(source) == "index.md" else text


def glossary() -> str:
    """The glossary section of the architecture page, as a page."""
    text = for_site("docs/architecture.md", (ROOT / "docs/architecture.md").read_text())
    return "# Glossary\n\n" + section(text, "Glossary").replace("\n### ", "\n## ")


def assemble(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for source in sources():
        where = target / str(place(source))
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(page(source))
    (target / GLOSSARY).write_text(glossary())
    for folder in ("pictures", "plots", "site"):
        shutil.copytree(ROOT / DOCS / folder, target / folder)
    for file in (ROOT / DOCS / "recipes").glob("*.yaml"):
        shutil.copy(file, target / "recipes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Copy the pages of the documentation site.")
    parser.add_argument("target", type=Path)
    assemble(parser.parse_args().target)


if __name__ == "__main__":
    main()
