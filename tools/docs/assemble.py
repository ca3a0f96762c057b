"""Lays out what MkDocs turns into the site: the pages of the repository, moved, linked anew, and completed by the code.

``python -m tools.docs.assemble build/docs``. The pages in the repository are the only source: a reader on GitHub sees
them as they are, and nothing that this writes is committed.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

from tools.docs.links import DOCS, OUTSIDE, ROOT, for_site, place, section
from tools.docs.reference import flags, routes

# What stands in a page → what takes its place on the site.
GENERATED: dict[str, Callable[[], str]] = {
    "<!-- generated: flags -->": flags,
    "<!-- generated: routes -->": routes,
}
GLOSSARY = "glossary.md"
HOME = "---\ntitle: Microscale\nhide: [navigation]\n---\n\n"


def sources() -> list[str]:
    """Every page of the repository that the site has."""
    inside = sorted(str(path.relative_to(ROOT)) for path in (ROOT / DOCS).rglob("*.md"))
    return [*OUTSIDE, *inside]


def page(source: str) -> str:
    """A page as the site has it."""
    text = for_site(source, (ROOT / source).read_text())
    for marker, make in GENERATED.items():
        if marker in text:
            text = text.replace(marker, make())
    return HOME + text if place(source) == "index.md" else text


def glossary() -> str:
    """The architecture's section on words, as a page of its own."""
    text = for_site("docs/architecture.md", (ROOT / "docs/architecture.md").read_text())
    return "# Glossary\n\n" + section(text, "Glossary").replace("\n### ", "\n## ")


def assemble(target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    for source in sources():
        where = target / str(place(source))
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(page(source))
    (target / GLOSSARY).write_text(glossary())
    for folder in ("plots", "site"):
        shutil.copytree(ROOT / DOCS / folder, target / folder)


def main() -> None:
    parser = argparse.ArgumentParser(description="Lay out the pages of the documentation site.")
    parser.add_argument("target", type=Path)
    assemble(parser.parse_args().target)


if __name__ == "__main__":
    main()
