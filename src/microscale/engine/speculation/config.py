"""What ``--speculative-config`` says, under the names that vLLM's users know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from microscale.backends.head_formats import HeadFormats
from microscale.engine.speculation.fixed_lengths import parse_lengths
from microscale.errors import BadSetting
from microscale.models.config import MAX_DRAFT

NGRAM, EAGLE3, DFLASH = "ngram", "eagle3", "dflash"
METHODS = (NGRAM, EAGLE3, DFLASH)
LM_HEAD_FORMATS = ("bf16", "mxfp8")
QUANTIZATIONS = ("mxfp8",)
MAX_LOOKUP = 64
DEFAULT_LOOKUP = 5
"""vLLM's."""
BY_BATCH_SIZE = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True)
class SpeculativeConfig:
    """How tokens are drafted, and how many."""

    method: str
    num_speculative_tokens: int
    model: str | None = None
    """``eagle3``, ``dflash``: the draft head, as a model is named. The embedded model has one of its own."""
    draft_lm_head: str | None = None
    """``eagle3``: the format in which the head's own lm_head is held; its own where it is not said."""
    quantization: str | None = None
    """``eagle3``, ``dflash``: the format in which all dense weights of the head are held, its own lm_head among them;
    their own where it is not said."""
    prompt_lookup_max: int = DEFAULT_LOOKUP
    """``ngram``: the last tokens of a request, at most so many, are looked for in what stands before them."""
    prompt_lookup_min: int = DEFAULT_LOOKUP
    """``ngram``: and at least so many must be found."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int], ...] | None = None
    """Fixed lengths: from so many sequences on, drafts of so many tokens. ``None``: as long as pays."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BadSetting(f"--speculative-config: there is no method {self.method!r}; use {' or '.join(METHODS)}.")
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFT:
            raise BadSetting(
                f"--speculative-config: num_speculative_tokens is {self.num_speculative_tokens}; a draft has 1 to "
                f"{MAX_DRAFT} tokens."
            )
        if self.model is not None and not self.is_head:
            raise BadSetting(f"--speculative-config: method {self.method} takes no model; leave {self.model!r} out.")
        if self.draft_lm_head is not None and self.method != EAGLE3:
            raise BadSetting(f"--speculative-config: method {self.method} has no lm_head of its own; leave it out.")
        if self.draft_lm_head not in (None, *LM_HEAD_FORMATS):
            raise BadSetting(
                f"--speculative-config: draft_lm_head is {self.draft_lm_head!r}; use {' or '.join(LM_HEAD_FORMATS)}."
            )
        self._check_quantization()
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP:
            raise BadSetting(
                f"--speculative-config: prompt_lookup_min {self.prompt_lookup_min} and prompt_lookup_max "
                f"{self.prompt_lookup_max} are not in order between 1 and {MAX_LOOKUP}."
            )

    def _check_quantization(self) -> None:
        if self.quantization is None:
            return
        if not self.is_head:
            raise BadSetting(f"--speculative-config: method {self.method} has no weights; leave quantization out.")
        if self.quantization not in QUANTIZATIONS:
            raise BadSetting(
                f"--speculative-config: quantization is {self.quantization!r}; use {' or '.join(QUANTIZATIONS)}, or "
                f"leave it out for the checkpoint's own format."
            )
        if self.draft_lm_head not in (None, self.quantization):
            raise BadSetting(
                f"--speculative-config: quantization {self.quantization} is of all dense weights, and draft_lm_head "
                f"asks for {self.draft_lm_head}; leave one of them out."
            )

    @property
    def head_formats(self) -> HeadFormats:
        """In which formats the head is held."""
        return HeadFormats(self.quantization, self.draft_lm_head)

    @property
    def is_head(self) -> bool:
        """The drafter is a model, a draft head."""
        return self.method != NGRAM


def parse_config(text: str | None) -> SpeculativeConfig | None:
    """The option's JSON; without it nothing is drafted."""
    if text is None:
        return None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise BadSetting(f"--speculative-config is no JSON: {error}.") from None
    if not isinstance(values, dict):
        raise BadSetting("--speculative-config is no JSON object; see docs/speculative.md.")
    values = dict(values)
    fixed = values.pop(BY_BATCH_SIZE, None)
    by_batch_size = None if fixed is None else parse_lengths(BY_BATCH_SIZE, fixed)
    return SpeculativeConfig(**_typed(values), num_speculative_tokens_per_batch_size=by_batch_size)


def _typed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that a config has, with values of their types."""
    known = {field.name: str if field.name in _STRINGS else int for field in fields(SpeculativeConfig)}
    known.pop(BY_BATCH_SIZE)
    for name, value in values.items():
        if name not in known:
            keys = ", ".join((*known, BY_BATCH_SIZE))
            raise BadSetting(f"--speculative-config has no key {name!r}; the keys are {keys}.")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise BadSetting(f"--speculative-config: {name} is {value!r}, not {_ARTICLE[known[name]]}.")
    for name in ("method", "num_speculative_tokens"):
        if name not in values:
            raise BadSetting(f"--speculative-config lacks {name!r}.")
    if values["method"] != NGRAM:
        for name in _LOOKUP:
            if name in values:
                raise BadSetting(f"--speculative-config: {name} is for method {NGRAM}; leave it out.")
    found = dict(values)
    # As in vLLM: who gives one of the two bounds means both.
    for name, other in (("prompt_lookup_max", "prompt_lookup_min"), ("prompt_lookup_min", "prompt_lookup_max")):
        if name not in values and other in values:
            found[name] = values[other]
    return found


_LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
_STRINGS = ("method", "model", "draft_lm_head", "quantization")
_ARTICLE = {str: "a string", int: "a whole number"}
