"""Turns what the user called the model into a folder: the embedded model's, a folder as it is, a hub id from the hub
or from its cache.

The hub's library imports its parts when they are first used; presets and folders need none of them and save 0.3 s.
"""

from __future__ import annotations

import re
from pathlib import Path

import huggingface_hub

from microscale.errors import BadCheckpoint
from microscale.models import embedded

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_CONFIGS = ["*.json", "chat_template.jinja"]
_WEIGHTS = ["*.safetensors"]
# gpt-oss repositories hold the weights three times: at top level, in original/ and in metal/.
_UNWANTED = ["*/*"]


def resolve(
    model: str,
    *,
    offline: bool,
    config_only: bool = False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The folder of ``model``.

    Of a hub id only the top-level JSON and safetensors files are fetched (``config_only``: only JSON), with the hub's
    progress bar, and a broken download goes on where it stopped. What is cached is used when ``offline`` or when the
    hub cannot be reached. ``cache_dir`` and ``endpoint`` are the hub library's own unless given.
    """
    if model == embedded.NAME:
        return embedded.embedded_folder()
    try:
        folder = Path(model).expanduser()
        # An empty name is the current folder to pathlib, and a forgotten argument to us.
        if model and folder.is_dir():
            return folder
        if model and folder.exists():
            raise BadCheckpoint(f"{model} is a file; give the folder of the model.")
    except (OSError, RuntimeError, ValueError) as exc:  # no access, a name too long, a user who is not there, a NUL
        raise BadCheckpoint(f"{model[:200]!r} cannot be opened as a folder: {exc}.") from exc
    if not _HUB_ID.fullmatch(model):
        raise BadCheckpoint(
            f"{model!r} is neither an existing folder, nor a hub id like openai/gpt-oss-20b, nor a preset's name, nor "
            f"{embedded.NAME}, the embedded model."
        )
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                cache_dir=cache_dir,
                endpoint=endpoint,
                local_files_only=offline,
                allow_patterns=_CONFIGS if config_only else _CONFIGS + _WEIGHTS,
                ignore_patterns=_UNWANTED,
            )
        )
    except huggingface_hub.errors.HFValidationError as exc:
        raise BadCheckpoint(f"There is no folder {model}, and it is no valid hub id.") from exc
    except huggingface_hub.errors.GatedRepoError as exc:
        raise BadCheckpoint(f"{model} is gated: accept its terms on the hub and log in with `hf auth login`.") from exc
    except huggingface_hub.errors.RepositoryNotFoundError as exc:
        raise BadCheckpoint(
            f"There is no folder {model}, and the hub has no such model, or a private one: log in with `hf auth login`."
        ) from exc
    except huggingface_hub.errors.LocalEntryNotFoundError as exc:
        why = "downloads are switched off" if offline else "the hub cannot be reached"
        raise BadCheckpoint(f"There is no folder {model}, it is not in the cache as a whole, and {why}.") from exc
    # HTTPError: httpx's or, from 2.0 on, httpx2's
    except (huggingface_hub.errors.HTTPError, OSError) as exc:  # type: ignore[attr-defined]
        raise BadCheckpoint(f"{model} could not be downloaded ({exc}); run the command again to go on.") from exc
