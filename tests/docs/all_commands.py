"""Every command of the pages that runs on a CPU, run as it stands: ``make docs-commands``."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.doc_commands import UNMARKED, nav
from support.run_commands import read_page, runnable

PAGES = [page for page in nav() if page not in UNMARKED and runnable(page)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    assert read_page(page, tmp_path) > 0
