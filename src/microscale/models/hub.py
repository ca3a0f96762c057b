"""Turns what the user called the model into a folder: the embedded model's, a folder as it is, a hub id from the hub
or from its cache.

The hub's library imports its parts when they are first used; presets and folders need none of them and save 0.3 s.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub

from microscale.errors import BadCheckpoint, Unsupported
from microscale.models import embedded
from microscale.models.json_object import read_json_object
from microscale.models.known_checkpoints import GGUF, hub_id, refuse_files, similar

# That a repository has no such file is what ``refuse_files`` explains.
logging.getLogger("huggingface_hub._snapshot_download").addFilter(
    lambda record: not record.getMessage().startswith("No files matched")
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_CONFIGS = ["*.json", "chat_template.jinja"]
_WEIGHTS = ["*.safetensors"]
# gpt-oss repositories hold the weights three times: at top level, in original/ and in metal/.
_UNWANTED = ["*/*"]
_CONFIG = "config.json"
_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class Missing:
    """What a download would bring."""

    files: int
    bytes: int
    cache: Path
    """The folder of the hub's cache."""

    def check_disk(self, model: str) -> None:
        """Raise if the disk has no room for it."""
        existing = next(folder for folder in (self.cache, *self.cache.parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if self.bytes > free:
            raise Unsupported(
                f"{model} is {self.bytes / 1e9:.1f} GB to download, and the disk of {self.cache} has "
                f"{free / 1e9:.1f} GB free; make room, or set HF_HOME to a folder on a larger disk."
            )


def resolve(
    model: str,
    *,
    offline: bool,
    config_only: bool = False,
    cache_dir: Path | None = None,
    endpoint: str | None = None,
) -> Path:
    """The folder of ``model``.

    Of a hub id only the top-level JSON and safetensors files are fetched (``config_only``: only JSON), with one
    progress bar, and a broken download goes on where it stopped. What is cached is used when ``offline`` or when the
    hub cannot be reached. ``cache_dir`` and ``endpoint`` are the hub library's own unless given.
    """
    if (folder := _local(model)) is not None:
        return folder
    model = hub_id(model)
    if not _HUB_ID.fullmatch(model):
        raise BadCheckpoint(
            f"{model!r} is neither an existing folder, nor a hub id like openai/gpt-oss-20b, nor a name such as "
            f"gpt-oss-20b, nor {embedded.NAME}, the embedded model.{similar(model)}"
        )
    try:
        with _ended_by_ctrl_c():
            found = Path(
                huggingface_hub.snapshot_download(
                    model,
                    cache_dir=cache_dir,
                    endpoint=endpoint,
                    local_files_only=offline,
                    allow_patterns=_CONFIGS if config_only else _CONFIGS + _WEIGHTS,
                    ignore_patterns=_UNWANTED,
                    tqdm_class=one_bar(shown=not config_only),
                )
            )
        if not offline and not (found / _CONFIG).exists():
            names = huggingface_hub.HfApi(endpoint).list_repo_files(model)
            if any(name.endswith(GGUF) for name in names) or not found.exists():
                refuse_files(model, names)
        return found
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


def missing(model: str, *, offline: bool, cache_dir: Path | None = None, endpoint: str | None = None) -> Missing | None:
    """What ``resolve`` would download; ``None`` for a folder, where everything is cached, and where it is unknown.

    Raises if the repository lacks a file that its index names.
    """
    if offline or _local(model) is not None:
        return None
    try:
        files = huggingface_hub.snapshot_download(
            hub_id(model),
            cache_dir=cache_dir,
            endpoint=endpoint,
            dry_run=True,
            allow_patterns=_CONFIGS + _WEIGHTS,
            ignore_patterns=_UNWANTED,
            tqdm_class=one_bar(shown=False),
        )
    except (huggingface_hub.errors.HTTPError, OSError):  # type: ignore[attr-defined]
        return None  # ``resolve`` says why
    there = {file.filename for file in files}
    for index in (Path(file.local_path) for file in files if file.filename.endswith(_INDEX) and file.is_cached):
        named = read_json_object(index).nested("weight_map").data.values()
        if absent := {file for file in named if isinstance(file, str)} - there:
            raise BadCheckpoint(f"{model} has no {min(absent)}, which its {index.name} names.")
    wanted = [file for file in files if file.will_download]
    cache = cache_dir or Path(huggingface_hub.constants.HF_HUB_CACHE)
    size = sum(file.file_size or 0 for file in wanted)
    return Missing(len(wanted), size, cache) if wanted else None


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Inside, Ctrl-C ends the program. Otherwise it waits for the library's threads, which first finish their files of
    several GB. Files that are half there are continued by the next download."""
    plain = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not plain or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def one_bar(*, shown: bool = True) -> Any:
    """A class of progress bars of which only the first that counts bytes is drawn. The hub's library draws several."""
    bar: Any = importlib.import_module("huggingface_hub.utils").tqdm
    drawn: list[object] = []

    class OneBar(bar):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            draw = shown and options.get("unit") == "B" and not drawn
            if draw:
                drawn.append(self)
            super().__init__(*arguments, **options | ({} if draw else {"disable": True}))

    return OneBar


def _local(model: str) -> Path | None:
    """The folder that ``model`` names, if it is one."""
    if model == embedded.NAME:
        return embedded.embedded_folder()
    try:
        folder = Path(model).expanduser()
        # An empty name is the current folder to pathlib, and a forgotten argument to us.
        if not model or not folder.exists():
            return None
        if not folder.is_dir():
            if folder.suffix.lower() == GGUF:
                refuse_files(model, [folder.name])
            raise BadCheckpoint(f"{model} is a file; give the folder of the model.")
        return folder
    except (OSError, RuntimeError, ValueError) as exc:  # no access, a name too long, a user who is not there, a NUL
        raise BadCheckpoint(f"{model[:200]!r} cannot be opened as a folder: {exc}.") from exc
