"""What every command that loads a model does."""

from __future__ import annotations

from collections.abc import Callable

from microscale.cli.console import progress_bar
from microscale.engine.loading.load import LoadOptions, load_model
from microscale.errors import BadSetting
from microscale.models.families import AnyModel, ModelWeights
from microscale.models.json_object import parse_json


def parse_overrides(text: str | None) -> dict[str, object]:
    """The JSON object of ``--hf-overrides``."""
    if text is None:
        return {}
    try:
        value = parse_json(text.encode())
    except ValueError as error:
        raise BadSetting(
            f"--hf-overrides is not JSON ({error}); use for instance '{{\"num_hidden_layers\": 2}}'."
        ) from None
    if not isinstance(value, dict):
        raise BadSetting("--hf-overrides takes a JSON object, for instance '{\"num_hidden_layers\": 2}'.")
    return value


def load_with_progress(options: LoadOptions, on_open: Callable[[ModelWeights], None]) -> AnyModel:
    """Load a model and show each layer as it comes. ``on_open`` hears the checked weights before anything is loaded."""
    with progress_bar(f"Loading {options.model}") as (start, advance):

        def opened(weights: ModelWeights) -> None:
            on_open(weights)
            start(weights.config.num_layers)

        return load_model(options, opened, on_layer=lambda: advance(1))
