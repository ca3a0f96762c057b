"""The only place that reads the environment.

Each variable is declared here with its type, default and meaning. An unreadable value is an error, never a silent
default. So is an unknown variable that starts with ``MICROSCALE_``, which is most likely a typing mistake.
"""

from __future__ import annotations

import contextlib
import os
import resource
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, fields
from pathlib import Path

from microscale.errors import BadSetting

PREFIX = "MICROSCALE_"
MOST_FILES = 65536
SPIN_COUNT = "1000"
"""Turns that a CPU thread of torch spins before it gives up its core. OpenMP's default takes milliseconds, which every
product of a small model waits if another program wants the core. The embedded model on two cores next to three busy
processes: 0.5 to 5 tokens/s by default, 15 to 32 with 1000; alone 71 to 115 and 75 to 101.
"""


@dataclass(frozen=True)
class Settings:
    """The environment variables, read once."""

    cache_dir: Path
    """``MICROSCALE_CACHE_DIR``: the folder of results that can be made again, such as proofs of kernels."""
    offline: bool
    """``MICROSCALE_OFFLINE`` (or ``HF_HUB_OFFLINE``): use only cached files, never the hub."""
    debug: bool
    """``MICROSCALE_DEBUG``: show tracebacks for errors that are otherwise one sentence."""
    vllm: bool
    """``MICROSCALE_VLLM``: whether the plug-in runs vLLM's experts. Default: on."""


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise BadSetting(f"{name}={env[name]!r} is neither true nor false; use 1 or 0.")


def _on(env: Mapping[str, str], name: str) -> bool:
    """A flag whose default is on."""
    return not env.get(name, "").strip() or _flag(env, name)


def _cache_base(env: Mapping[str, str]) -> Path:
    """The folder of caches; the temporary folder for a user without a home directory, as in a bare container."""
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
    """The variables that torchrun sets in each process."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int


def torchrun(env: Mapping[str, str] | None = None) -> Torchrun | None:
    """torchrun's variables, or ``None`` if torchrun did not start this process."""
    env = os.environ if env is None else env
    if "TORCHELASTIC_RUN_ID" not in env:
        return None
    try:
        rank, world, local, port = (int(env[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"))
        return Torchrun(rank, world, local, env["MASTER_ADDR"], port)
    except (KeyError, ValueError) as error:
        raise BadSetting(f"TORCHELASTIC_RUN_ID is set, but another variable of torchrun is not: {error}.") from None


def limit_spinning(env: MutableMapping[str, str] | None = None) -> None:
    """Set ``SPIN_COUNT`` unless the user chose how threads wait. Call it before torch is imported."""
    env = os.environ if env is None else env
    if "OMP_WAIT_POLICY" not in env:
        env.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def allow_connections() -> None:
    """Raise this process's soft limit on open files, of which each connection is one, as far as the hard one allows:
    most systems start with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
