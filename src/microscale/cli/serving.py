"""What ``microscale serve`` needs of the server's packages. They take a second to import, in which the engine process
fetches weights; so the command itself imports this module when it has told the engine what it will be asked for.
"""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path

import uvloop

from microscale.errors import MicroscaleError
from microscale.models import embedded, hub
from microscale.server.options import ServeOptions
from microscale.server.run import serve
from microscale.text.byte_tokenizer import byte_tokenizer
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer


def run(options: ServeOptions) -> int:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve(options))


def find_tokenizer(name: str, *, offline: bool, is_dummy: bool) -> Tokenizer:
    """The tokenizer of a folder or a hub id. A preset has none: its random weights get one of bytes.

    Which presets there are the engine knows, and refuses others; here a preset is what cannot be anything else.
    """
    if is_dummy and "/" not in name and name != embedded.NAME and not Path(name).is_dir():
        return byte_tokenizer()
    folder = hub.resolve(name, offline=offline, config_only=True)
    try:
        tokenizer = Tokenizer.load(folder)
        chat_format_for(tokenizer)
    except MicroscaleError:
        # First what is wrong with the model: that a GGUF folder has no tokenizer is true, and no help.
        importlib.import_module("microscale.models.families").read_model_config(folder)
        raise
    return tokenizer
