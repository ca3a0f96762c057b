"""A rank that behaves oddly: the real process, with one thing changed. ``python -m support.odd_rank ODDITY``"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from microscale.engine.ranks import __main__ as process
from microscale.engine.ranks import follower
from microscale.engine.ranks import messages as wire
from microscale.parallel.group import Group

ODD_CALL = 40
"""The sum at which it happens: in the midst of a step."""


def hang() -> None:
    """Stands still in the midst of a step, and says that it is alive."""
    plain = Group.sum

    def sum(self: Group, part: Any) -> Any:
        if self.calls >= ODD_CALL:
            time.sleep(3600)
        return plain(self, part)

    Group.sum = sum  # type: ignore[method-assign]


def other_checkpoint() -> None:
    """Loads random weights of the same shape."""
    plain = follower.options_of

    def options_of(join: wire.Join) -> Any:
        config = msgspec.structs.replace(join.config, load_format="dummy")
        return plain(msgspec.structs.replace(join, config=config))

    follower.options_of = options_of


ODDITIES: dict[str, Callable[[], None]] = {found.__name__: found for found in (hang, other_checkpoint)}

if __name__ == "__main__":
    ODDITIES[sys.argv[1]]()
    os._exit(process.main(sys.argv[2:]))
