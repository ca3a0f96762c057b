"""What every command that loads a model does."""

from __future__ import annotations

from microscale.cli.console import progress_bar
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared
from microscale.models.families import AnyModel


def load_with_progress(prepared: Prepared) -> AnyModel:
    """Load a model and show each layer as it comes."""
    with progress_bar(f"Loading {prepared.options.model}") as (start, advance):
        start(prepared.config.num_layers)
        return load(prepared, on_layer=lambda: advance(1))
