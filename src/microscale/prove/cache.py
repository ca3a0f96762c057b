"""Keeps facts on disk: one small JSON file per compilation, named by all that its result depends on.

Only what compiled is kept. An error may come from a full disk or a killed process, and whoever mends a kernel wants it
compiled again in any case. A file that cannot be read is as good as none: the variant is compiled anew.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from microscale.prove.compiler import Facts


class FactsCache:
    """A folder of facts; with no folder it keeps nothing."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._folder = None if cache_dir is None else cache_dir / "prove"

    def load(self, key: str) -> Facts | None:
        if self._folder is None:
            return None
        try:
            return Facts.from_json(json.loads((self._folder / f"{key}.json").read_bytes()))
        except (OSError, ValueError):  # missing, cut short, not UTF-8, or of another shape
            return None

    def store(self, key: str, facts: Facts) -> None:
        if self._folder is None or facts.error is not None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: a reader sees a whole file or none, also when two proofs run at once.
        with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".tmp", delete=False) as file:
            json.dump(facts.to_json(), file)
        os.replace(file.name, self._folder / f"{key}.json")
