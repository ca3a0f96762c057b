"""What every command that loads a model does."""

from __future__ import annotations

from microscale.cli.console import loading_bar
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import Prepared
from microscale.errors import BadSetting
from microscale.models.families import AnyModel
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


def load_with_progress(prepared: Prepared) -> AnyModel:
    """Load a model and show how much of it is there, and how fast it comes."""
    with loading_bar(f"Loading {prepared.options.model}") as on_progress:
        return load(prepared, on_progress)
