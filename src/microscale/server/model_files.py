"""What the server itself reads of a model's folder: the tokenizer, the chat template, the sampling defaults."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path

from microscale.engine.sampling_params import SamplingParams
from microscale.errors import BadCheckpoint, BadRequest, BadSetting, MicroscaleError
from microscale.models import embedded, hub
from microscale.models.config import GENERATION_CONFIG
from microscale.models.generation_config import read_sampling
from microscale.server.options import SamplingDefaults
from microscale.text.byte_tokenizer import byte_tokenizer
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)
AUTO, NONE = "auto", "none"


def has_files(name: str, *, is_dummy: bool) -> bool:
    """Whether the model has a folder. Random weights of a preset have none.

    The engine knows the presets and refuses other names; here a preset is whatever cannot be anything else.
    """
    return not is_dummy or "/" in name or name == embedded.NAME or Path(name).is_dir()


def find_tokenizer(name: str, template: Path | None, *, offline: bool, is_dummy: bool) -> Tokenizer:
    """The tokenizer of a folder or a hub id. A model without files gets a tokenizer of bytes."""
    if not has_files(name, is_dummy=is_dummy):
        return byte_tokenizer()
    folder = hub.resolve(name, offline=offline, config_only=True)
    try:
        tokenizer = Tokenizer.load(folder)
        chat_format_for(tokenizer, template)
    except MicroscaleError:
        # First what is wrong with the model: that a GGUF folder has no tokenizer is true, and no help.
        importlib.import_module("microscale.models.families").read_model_config(folder)
        raise
    return tokenizer


def read_sampling_defaults(choice: str, model: str, *, offline: bool, is_dummy: bool) -> SamplingDefaults:
    """``--generation-config``: of the model, of a folder, or none."""
    if choice == NONE or (choice == AUTO and not has_files(model, is_dummy=is_dummy)):
        return SamplingDefaults()
    folder = hub.resolve(model, offline=offline, config_only=True) if choice == AUTO else Path(choice).expanduser()
    file = folder / GENERATION_CONFIG
    if not file.is_file():
        if choice == AUTO:
            return SamplingDefaults()
        raise BadSetting(
            f"--generation-config {choice[:200]!r} is neither {AUTO}, nor {NONE}, nor a folder with a {file.name}."
        )
    values = read_sampling(folder)
    try:
        SamplingParams(**values)
    except BadRequest as error:
        raise BadCheckpoint(f"{file}: {error} --generation-config {NONE} ignores the file.") from None
    defaults = SamplingDefaults(**values)
    if changed := defaults.changed():
        listed = ", ".join(f"{name} {value:g}" for name, value in changed.items())
        log.info("Sampling defaults from %s: %s. --generation-config none ignores them.", file.name, listed)
    return defaults
