"""Batches in a fixed order, from shards that worker processes make while the model trains."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo import shards
from demo.shards import Recipe

AHEAD = 3
"""Shards asked for beyond the current one, for each worker."""


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # [rows, length] int64
    documents: Tensor  # [rows, length] int32
    weights: Tensor  # [rows, length] float32


@dataclass(frozen=True)
class Source:
    """Where rows come from."""

    folder: Path
    recipe: Recipe
    workers: int = 0
    """0: shards are made in this process, when they are needed."""


class Feed:
    """Row ``n`` of a seed is the same in every run: ``position`` is all there is to remember."""

    def __init__(self, source: Source, position: int = 0) -> None:
        self.source = source
        self.position = position
        self._pool = multiprocessing.get_context("spawn").Pool(source.workers) if source.workers else None
        self._asked: dict[int, AsyncResult[Path]] = {}
        self._held: tuple[int, dict[str, np.ndarray]] | None = None

    def take(self, num_rows: int, device: torch.device) -> Batch:
        """The next rows; they may span two shards."""
        parts: list[dict[str, np.ndarray]] = []
        while num_rows:
            shard, at = divmod(self.position, self.source.recipe.num_rows)
            count = min(num_rows, self.source.recipe.num_rows - at)
            parts.append({name: array[at : at + count] for name, array in self._load(shard).items()})
            self.position += count
            num_rows -= count
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return Batch(
            torch.from_numpy(joined["tokens"].astype(np.int32)).to(device).long(),
            torch.from_numpy(joined["documents"]).to(device).int(),
            torch.from_numpy(joined["weights"]).to(device).float() / 100,
        )

    def close(self) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def _load(self, shard: int) -> dict[str, np.ndarray]:
        if self._held is None or self._held[0] != shard:
            with np.load(self._path(shard)) as file:
                self._held = shard, {name: file[name] for name in file.files}
        return self._held[1]

    def _path(self, shard: int) -> Path:
        folder, recipe = self.source.folder, self.source.recipe
        if self._pool is None:
            return shards.write(folder, recipe, shard)
        for ahead in range(shard, shard + AHEAD * self.source.workers + 1):
            if ahead not in self._asked:
                self._asked[ahead] = self._pool.apply_async(shards.write, (folder, recipe, ahead))
        return self._asked[shard].get()
