"""What the loader asks of the ranks that share a model, and where it puts them. Needs nothing of theirs: a model on one
rank is loaded without ``engine/ranks``, whose messages need packages that not every machine has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from microscale.backends.ops import Ranks
from microscale.backends.threads import all_threads
from microscale.engine.config import EngineConfig
from microscale.engine.engine import Runner
from microscale.engine.limits import Limits
from microscale.engine.loading.options import choose_device
from microscale.engine.pages import PagePool
from microscale.engine.runner import ModelRunner
from microscale.engine.speculation.drafter import Launched
from microscale.errors import BadSetting, MicroscaleError
from microscale.hardware.sums import Joined
from microscale.models.config import LayerKind
from microscale.parallel.transport import Transport


@dataclass(frozen=True)
class Assembly:
    """What every rank makes its runner of."""

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
    transport: Transport
    sharing: int
    """Ranks that share one device's memory."""
    threads: int | None


class Team(Protocol):
    """All ranks of one model, seen by rank 0: ``engine/ranks/team.RankTeam``."""

    options: EngineConfig
    memory: list[Mapping[str, int]]
    joined: Joined | None
    """How the ranks add up, once they have met."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a step."""

    def agree(self, pages: Mapping[LayerKind, int], found: Mapping[str, str], memory: Mapping[str, int]) -> None: ...

    def pages(self) -> dict[LayerKind, int]: ...

    def join(self, device: torch.device) -> Ranks: ...

    def loaded(self) -> None: ...

    def check(self) -> None: ...

    def assemble(self, assembly: Assembly) -> None: ...

    def lead(self, runner: ModelRunner, pools: Mapping[LayerKind, PagePool]) -> Runner: ...

    def drafting(self, step: Launched, most: int) -> AbstractContextManager[None]:
        """See ``speculation.drafter.Others``."""

    def preparing_drafts(self) -> AbstractContextManager[None]: ...

    def on_stuck(self, tell: Callable[[MicroscaleError], None]) -> None:
        """Who hears of a fault that no step can raise: there is none, or it cannot come back."""

    def close(self) -> None: ...


def place(options: EngineConfig, world: int) -> Placement:
    """A GPU for each rank, or all of a machine on the device that the user named. ``world``: ranks of one machine; on
    others they are placed alike."""
    device = choose_device(options.device)
    if device.type == "cpu":
        # Ranks share the cores: threads of one that wait for another's would stand in its way.
        threads = options.threads or max(1, all_threads() // world)
        return Placement(("cpu",) * world, Transport.GLOO, world, threads)
    if ":" in options.device:
        # NCCL takes no two ranks on one GPU. For tests: each rank has its part of the memory.
        return Placement((str(device),) * world, Transport.GLOO, world, options.threads)
    count = torch.cuda.device_count()
    if count < world:
        raise BadSetting(
            f"--tensor-parallel-size {world} needs {world} GPUs and torch sees {count}; --device cuda:0 puts all ranks "
            f"on one, which is for tests, and --device cpu on the CPU."
        )
    return Placement(tuple(f"cuda:{rank}" for rank in range(world)), Transport.NCCL, 1, options.threads)
