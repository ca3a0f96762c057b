"""How the owner starts the engine process, and waits until it is ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from microscale.engine.process.child import COMMAND
from microscale.engine.process.link import Link
from microscale.engine.process.messages import (
    Failed,
    Loading,
    Ready,
    check_hello,
    decode_for_owner,
    error_of,
)
from microscale.errors import BadMessage


@dataclass(frozen=True)
class Launch:
    """How the process is started, and how long it may be silent."""

    command: tuple[str, ...] = COMMAND
    load_timeout_s: float = 1800.0
    silence_s: float = 300.0
    """An engine with work that tells of no step for so long is taken for hung. A first step may compile kernels."""
    on_progress: Callable[[int, int], None] = lambda done, total: None
    """Hears how many bytes of all are loaded."""
    on_kernels: Callable[[int, int], None] = lambda done, total: None
    """Hears, after that, how many of the kernels are compiled that were not."""


async def wait_ready(link: Link, launch: Launch) -> Ready:
    """Until the model is loaded; raises what its load raised, in its own class."""
    check_hello(await link.next_frame())
    while True:
        match decode_for_owner(await link.next_frame()):
            case Loading(done, total, kernels):
                (launch.on_kernels if kernels else launch.on_progress)(done, total)
            case Ready() as ready:
                return ready
            case Failed(kind, text):
                raise error_of(kind, text)
            case other:
                raise BadMessage(f"The engine process said {type(other).__name__} before it was ready.")
