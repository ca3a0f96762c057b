"""The ranks that share a model, as the loader sees them, and where they run. A model on one rank is loaded without
``engine/ranks``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from microscale.engine.config import EngineConfig
from microscale.engine.engine import Runner
from microscale.engine.limits import Limits
from microscale.engine.loading.options import choose_device
from microscale.engine.pages import PagePool
from microscale.engine.runner import ModelRunner
from microscale.engine.speculation.drafter import LaunchedStep
from microscale.errors import BadSetting, MicroscaleError
from microscale.models.config import LayerKind
from microscale.planning.ops import Ranks
from microscale.planning.threads import all_threads


@dataclass(frozen=True)
class Assembly:
    """What every rank needs to make its runner."""

    limits: Limits
    pages: Mapping[LayerKind, int]
    enforce_eager: bool
    fill_up_prompts: bool | None
    draft_tokens: int
    head: bool
    """Drafts come from the draft head, which every rank has."""


@dataclass(frozen=True)
class Placement:
    """Where ranks run."""

    devices: tuple[str, ...]
    sharing: int
    """Ranks that share one device's memory."""
    threads: int | None


class Team(Protocol):
    """All ranks of one model, seen by rank 0: ``engine/ranks/leader.RankTeam``."""

    options: EngineConfig
    memory: list[Mapping[str, int]]
    """Bytes that each rank needs, by purpose."""

    def agree(
        self, pages: Mapping[LayerKind, int], fingerprint: Mapping[str, str], memory: Mapping[str, int]
    ) -> None: ...

    def pages(self) -> dict[LayerKind, int]: ...

    def join(self, device: torch.device) -> Ranks: ...

    def loaded(self) -> None: ...

    def check(self) -> None: ...

    def assemble(self, assembly: Assembly) -> None: ...

    def lead(self, runner: ModelRunner, pools: Mapping[LayerKind, PagePool]) -> Runner: ...

    def drafting(self, step: LaunchedStep, most: int) -> AbstractContextManager[None]:
        """See ``speculation.drafter.Others``."""

    def preparing_drafts(self) -> AbstractContextManager[None]: ...

    def on_stuck(self, report: Callable[[MicroscaleError], None]) -> None:
        """Call ``report`` with a fault that no step can raise: none runs, or it cannot return."""

    def close(self) -> None: ...


def place(options: EngineConfig, world: int) -> Placement:
    """A GPU for each rank, or one device for all where the user named it. ``world``: ranks of one machine; other
    machines are alike."""
    device = choose_device(options.device)
    if device.type == "cpu":
        # Ranks share the cores, and threads that wait for another rank would block it.
        threads = options.threads or max(1, all_threads() // world)
        return Placement(("cpu",) * world, world, threads)
    if ":" in options.device:
        # NCCL refuses two ranks on one GPU, so they use gloo. This is for tests: each rank has its share of the memory.
        return Placement((str(device),) * world, world, options.threads)
    count = torch.cuda.device_count()
    if count < world:
        raise BadSetting(
            f"--tensor-parallel-size {world} needs {world} GPUs and torch sees {count}; --device cuda:0 puts all ranks "
            f"on one, which is for tests, and --device cpu on the CPU."
        )
    return Placement(tuple(f"cuda:{rank}" for rank in range(world)), 1, options.threads)
