"""What every command that loads a model does."""

from __future__ import annotations

from microscale.backends.ops import Ranks
from microscale.backends.ranks import ALONE
from microscale.cli.bars import loading_bar
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared
from microscale.models.families import AnyModel


def load_with_progress(prepared: Prepared, ranks: Ranks = ALONE) -> AnyModel:
    """Load a model and show how much of it is there, and how fast it comes. ``ranks``: see ``load``."""
    with loading_bar(f"Loading {prepared.options.model}") as tell:
        return load(prepared, lambda done, total: tell(done, total, "bytes"), ranks)
