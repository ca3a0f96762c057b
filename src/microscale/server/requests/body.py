"""BODYDOC"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

MANY = 65536
"""Only lists of tokens are longer, whatever ``Limits`` says. Every list fails at its first fault: pydantic holds
the interpreter while it collects them, 3.7 s for 300,000 (2 cores)."""


class Only(NamedTuple):
    """The values of a key that ask for what is done anyway, and why no other can be honoured."""

    values: tuple[object, ...]
    why: str


class Body(BaseModel):
    """JSON with no guesses: a string is no number, and NaN is no number."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, frozen=True)
    HARMLESS: ClassVar[Mapping[str, str]] = {}
    """Keys that cannot change the answer, with the reason. ``--strict-requests`` accepts these too."""
    ONLY: ClassVar[Mapping[str, Only]] = {}
    """Keys that would change the answer in a way we cannot give."""

    def passed_over(self) -> Iterable[str]:
        """Values that nothing reads, by name: a known key may hold something that is not known here."""
        return ()

    @model_validator(mode="after")
    def _refuse_unmet(self) -> Self:
        if not self.model_extra:
            return self
        for name, only in self.ONLY.items():
            value = self.model_extra.get(name)
            # 1 == True in Python, not in JSON.
            if value is not None and not any(type(value) is type(good) and value == good for good in only.values):
                kind = "unsupported_value" if only.values else "unsupported_parameter"
                told = "is not supported with this value" if only.values else "is not supported"
                raise PydanticCustomError(kind, "{told}: {why}", {"field": name, "told": told, "why": only.why})
        return self


log = logging.getLogger(__name__)
IGNORED_HEADER = "x-microscale-ignored"
"""In which a reply names them."""
MAX_NAMED = 32
"""Ignored keys that one reply names."""
MAX_LOGGED = 256
"""Ignored keys that one process logs: the names are the clients', and there is no end to them."""
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Ignored(NamedTuple):
    """A key that was passed over."""

    path: str
    """``messages.parsed``: without indices, so that a long conversation names it once."""
    is_harmless: bool
    """We know the key and why it may be passed over."""


def ignored_keys(body: Body) -> list[Ignored]:
    """The keys of ``body`` and of everything in it that nothing reads, each once, in the order of their places."""
    return list(dict.fromkeys(_walk(body, "")))


def _walk(body: Body, path: str) -> Iterator[Ignored]:
    for name, value in (body.model_extra or {}).items():
        if value is not None and name not in body.ONLY:
            yield Ignored(_joined(path, name), name in body.HARMLESS)
    for name in body.passed_over():
        yield Ignored(_joined(path, name), False)
    for name, value in body.__dict__.items():
        if isinstance(value, Body):
            yield from _walk(value, _joined(path, name))
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for item in value:
                yield from _walk(item, _joined(path, name))


def _joined(path: str, name: str) -> str:
    # Names go into a header and into the log; who sends them chooses them.
    shown = name.rstrip("_") if NAME.fullmatch(name) else "?"
    return f"{path}.{shown}" if path else shown


class IgnoredLog:
    """Logs each ignored key once per process."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def tell(self, keys: Sequence[Ignored]) -> None:
        for key in keys:
            if key.path in self._told or len(self._told) >= MAX_LOGGED:
                continue
            self._told.add(key.path)
            why = "it cannot change the answer" if key.is_harmless else "it is not known here"
            log.warning("The request's key %s is ignored: %s.", key.path, why)
            if len(self._told) == MAX_LOGGED:
                log.warning("%d ignored keys were logged; further ones are named in replies only.", MAX_LOGGED)


def ignored_header(keys: Sequence[Ignored]) -> str:
    """The value of ``x-microscale-ignored``."""
    named = [key.path for key in keys[:MAX_NAMED]]
    return ", ".join([*named, "..."] if len(keys) > MAX_NAMED else named)
