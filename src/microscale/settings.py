"""The only place that reads the environment.

Each variable is declared here with its type, default and meaning. A value that cannot be read is an error, never a
silent default, and so is an unknown variable that starts with ``MICROSCALE_``: it is most likely a typing mistake.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path

from microscale.errors import BadSetting

PREFIX = "MICROSCALE_"
SPIN_COUNT = "1000"
"""Turns that a CPU thread of torch waits for another before it gives up its core. As many as OpenMP takes by itself are
milliseconds, and where another program wants the core every product of a small model waits that long. The embedded
model on two cores beside three busy processes: 0.5 to 5 tokens/s, 15 to 32 with this; alone 71 to 115, 75 to 101.
"""


@dataclass(frozen=True)
class Settings:
    """What the environment says, read once."""

    cache_dir: Path
    """``MICROSCALE_CACHE_DIR``: where compiled kernels' proofs and other things that can be remade are kept."""
    offline: bool
    """``MICROSCALE_OFFLINE`` (or ``HF_HUB_OFFLINE``): never ask the hub, use only what is cached."""
    debug: bool
    """``MICROSCALE_DEBUG``: show tracebacks for errors that are otherwise one sentence."""
    vllm: bool
    """``MICROSCALE_VLLM``: whether the plug-in takes over vLLM's experts; on unless it says off."""


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise BadSetting(f"{name}={env[name]!r} is neither true nor false; use 1 or 0.")


def _on(env: Mapping[str, str], name: str) -> bool:
    """A flag that is on unless it says off."""
    return not env.get(name, "").strip() or _flag(env, name)


def _cache_base(env: Mapping[str, str]) -> Path:
    """Where caches go; a user without a home directory (a bare container user) has the temporary folder."""
    if env.get("XDG_CACHE_HOME"):
        return Path(env["XDG_CACHE_HOME"])
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return Path(tempfile.gettempdir())


def load(env: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from ``env`` (the process's own environment by default)."""
    env = os.environ if env is None else env
    known = {PREFIX + field.name.upper() for field in fields(Settings)}
    for name in env:
        if name.startswith(PREFIX) and name not in known:
            raise BadSetting(f"Unknown environment variable {name}; known are {', '.join(sorted(known))}.")
    return Settings(
        cache_dir=Path(env.get("MICROSCALE_CACHE_DIR") or _cache_base(env) / "microscale"),
        offline=_flag(env, "MICROSCALE_OFFLINE") or _flag(env, "HF_HUB_OFFLINE"),
        debug=_flag(env, "MICROSCALE_DEBUG"),
        vllm=_on(env, "MICROSCALE_VLLM"),
    )


@dataclass(frozen=True)
class Torchrun:
    """What torchrun says to each process that it starts."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int


def torchrun(env: Mapping[str, str] | None = None) -> Torchrun | None:
    """What torchrun has said to this process, if it was that which started it."""
    env = os.environ if env is None else env
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    try:
        rank, world, local, port = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
        return Torchrun(rank, world, local, env["MASTER_ADDR"], port)
    except (KeyError, ValueError) as error:
        raise BadSetting(f"torchrun has set TORCHELASTIC_RUN_ID and not what belongs to it: {error}.") from None


def limit_spinning(env: MutableMapping[str, str] | None = None) -> None:
    """Before torch is imported, and unless the user has said how threads wait."""
    env = os.environ if env is None else env
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
