"""Tables in pages of Markdown that a command rewrites, between markers."""

from __future__ import annotations

import re
from pathlib import Path

from microscale.errors import BadSetting


def write_section(page: Path, name: str, section: str) -> None:
    """Put ``section`` between the markers of ``name`` in ``page``, and keep everything else."""
    begin, end = (f"<!-- {edge} of the {name} -->" for edge in ("begin", "end"))
    block = f"{begin}\n{section.strip()}\n{end}"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    try:
        text = page.read_text(encoding="utf-8")
        rewritten = pattern.sub(lambda _: block, text) if pattern.search(text) else f"{text.rstrip()}\n\n{block}\n"
        page.write_text(rewritten, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"--markdown {page} cannot be rewritten: {error}.") from None
