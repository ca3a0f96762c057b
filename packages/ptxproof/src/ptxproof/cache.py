"""Cache on disk of compilations: facts for ``prove``, PTX for the interpreter. There is one JSON file per compilation,
named by a hash of everything that the result depends on.

Errors are not kept: they may come from a full disk or a killed process, and a kernel that was fixed must be compiled
again in any case. A file that cannot be read counts as missing.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from ptxproof.compiler import Facts, cache_key, compile_to_ir, compile_to_ptx
from ptxproof.launch import TritonKernel


class _Folder:
    """JSON files by key; with no folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, key: str) -> Any:
        """What was stored; ``None`` where nothing was or it cannot be read (missing, cut short, not UTF-8)."""
        if self._folder is None:
            return None
        try:
            return json.loads((self._folder / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def store(self, key: str, data: Any) -> None:
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # Written aside and renamed: a reader sees a whole file or none, also when two proofs run at once.
        with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".tmp", delete=False) as file:
            json.dump(data, file)
        os.replace(file.name, self._folder / f"{key}.json")


class FactsCache:
    """A folder of facts; with no folder it keeps nothing."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._files = _Folder(None if cache_dir is None else cache_dir / "prove")

    def load(self, key: str) -> Facts | None:
        try:
            return Facts.from_json(self._files.load(key))
        except ValueError:  # nothing, or of another shape
            return None

    def store(self, key: str, facts: Facts) -> None:
        if facts.error is None:
            self._files.store(key, facts.to_json())


class PtxCache:
    """A folder of PTX with the shared memory that a block takes; with no folder it keeps nothing."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._files = _Folder(None if cache_dir is None else cache_dir / "ptx")

    def load(self, kernel: TritonKernel, sm: int) -> tuple[str, int] | None:
        kept = self._files.load(cache_key(kernel, sm))
        if isinstance(kept, dict) and isinstance(kept.get("ptx"), str) and type(kept.get("shared")) is int:
            return kept["ptx"], kept["shared"]
        return None

    def compiled(self, kernel: TritonKernel, sm: int) -> tuple[str, int]:
        """What ``compile_to_ptx`` gives, from the folder if it is there."""
        kept = self.load(kernel, sm)
        if kept is None:
            kept = compile_to_ptx(kernel, sm)
            self._files.store(cache_key(kernel, sm), {"ptx": kept[0], "shared": kept[1]})
        return kept


class IrCache:
    """A folder of what ``compile_to_ir`` gives."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._files = _Folder(None if cache_dir is None else cache_dir / "ir")

    def compiled(self, kernel: TritonKernel, sm: int) -> str:
        key = cache_key(kernel, sm)
        kept = self._files.load(key)
        if not isinstance(kept, str):
            kept = compile_to_ir(kernel, sm)
            self._files.store(key, kept)
        return kept
