"""JSON objects of requests, and the rule for keys that no field reads.

Clients send more every month, and hand back what they got with keys of their own. So a key that we do not know is
passed over and named, in the log and in the reply's header ``x-microscale-ignored``. A key that we know and cannot
honour (``ONLY``) is a 400, since passing it over would give another answer than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
