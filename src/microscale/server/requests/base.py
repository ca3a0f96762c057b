"""JSON objects of requests, and the rules for keys that no field reads.

Clients send new keys every month, and send back what they received with keys of their own. An unknown key is therefore
ignored and named in the log and in the reply's header ``x-microscale-ignored``. A key that is known but not supported
(``ONLY``) is a 400, since ignoring it would give a different answer than requested.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MANY = 65536
"""The maximum length of lists, except lists of tokens, whatever ``RequestLimits`` says. Every list fails at its first
error: pydantic blocks the interpreter while it collects errors, 3.7 s for 300,000 (2 cores)."""


class Only(NamedTuple):
    """The values of a key that change nothing, and why no other value is supported."""

    values: tuple[object, ...]
    why: str


class Body(BaseModel):
    """A JSON object, read strictly: neither a string nor NaN is accepted as a number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
    HARMLESS: ClassVar[Mapping[str, str]] = {}
    """Keys that cannot change the answer, with the reason. ``--strict-requests`` accepts these too."""
    ONLY: ClassVar[Mapping[str, Only]] = {}
    """Keys that would change the answer in a way that is not supported, except for certain values."""

    def ignored_values(self) -> Iterable[str]:
        """Names of values that nothing reads: a known key may contain something unknown."""
        return ()

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Self:
        if not self.model_extra:
            return self
        for name, only in self.ONLY.items():
            value = self.model_extra.get(name)
            # 1 == True in Python, not in JSON.
            if value is not None and not any(type(value) is type(good) and value == good for good in only.values):
                kind = "unsupported_value" if only.values else "unsupported_parameter"
                problem = "is not supported with this value" if only.values else "is not supported"
                raise PydanticCustomError(
                    kind, "{problem}: {why}", {"field": name, "problem": problem, "why": only.why}
                )
        return self


log = logging.getLogger(__name__)
IGNORED_HEADER = "x-microscale-ignored"
"""The header in which a reply names ignored keys."""
MAX_NAMED = 32
"""Maximum number of ignored keys that one reply names."""
MAX_LOGGED = 256
"""Maximum number of ignored keys that one process logs: clients choose the names, so there is no end to them."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Ignored(NamedTuple):
    """A key that was ignored."""

    path: str
    """Such as ``messages.parsed``: without indices, so that a long conversation names it once."""
    is_harmless: bool
    """The key is known, and ignoring it cannot change the answer."""


def ignored_keys(body: Body) -> list[Ignored]:
    """The keys in ``body``, at any depth, that nothing reads: each once, in order of appearance."""
    return list(dict.fromkeys(_walk(body, "")))


def _walk(body: Body, path: str) -> Iterator[Ignored]:
    for name, value in (body.model_extra or {}).items():
        if value is not None and name not in body.ONLY:
            yield Ignored(_joined(path, name), name in body.HARMLESS)
    for name in body.ignored_values():
        yield Ignored(_joined(path, name), name in body.HARMLESS)
    for name, value in body.__dict__.items():
        if isinstance(value, Body):
            yield from _walk(value, _joined(path, name))
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for item in value:
                yield from _walk(item, _joined(path, name))


def _joined(path: str, name: str) -> str:
    # Clients choose these names, and they go into a header and into the log.
    shown = name.rstrip("_") if NAME.fullmatch(name) else "?"
    return f"{path}.{shown}" if path else shown


class IgnoredLog:
    """Logs each ignored key once per process."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log(self, keys: Sequence[Ignored]) -> None:
        for key in keys:
            if key.path in self._logged or len(self._logged) >= MAX_LOGGED:
                continue
            self._logged.add(key.path)
            why = "it cannot change the answer" if key.is_harmless else "it is unknown"
            log.warning("Ignoring the request's key %s: %s.", key.path, why)
            if len(self._logged) == MAX_LOGGED:
                log.warning("%d ignored keys have been logged; further ones are named only in replies.", MAX_LOGGED)


def ignored_header(keys: Sequence[Ignored]) -> str:
    """The value of ``x-microscale-ignored``."""
    named = [key.path for key in keys[:MAX_NAMED]]
    return ", ".join([*named, "..."] if len(keys) > MAX_NAMED else named)
