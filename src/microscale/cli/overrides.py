"""``--hf-overrides`` of every command that has it. Without torch."""

from __future__ import annotations

from microscale.errors import BadSetting
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
