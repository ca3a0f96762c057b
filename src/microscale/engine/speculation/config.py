"""The option ``--speculative-config``. Its keys have vLLM's names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

from microscale.errors import BadSetting
from microscale.models.config import MAX_DRAFT, HeadFormats

NGRAM, EAGLE3, DFLASH, MTP = "ngram", "eagle3", "dflash", "mtp"
METHODS = (NGRAM, EAGLE3, DFLASH, MTP)
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
    """``eagle3``, ``dflash``: folder or hub id of the draft head. The embedded model has its own."""
    draft_lm_head: str | None = None
    """``eagle3``: the format in which the head's own lm_head is held; ``None``: the checkpoint's."""
    quantization: str | None = None
    """``eagle3``, ``dflash``, ``mtp``: the format in which all dense weights of the head are held, also its own
    lm_head; ``None``: the checkpoint's."""
    prompt_lookup_max: int = DEFAULT_LOOKUP
    """``ngram``: the maximum number of a request's last tokens that are looked up in the text before them."""
    prompt_lookup_min: int = DEFAULT_LOOKUP
    """``ngram``: the minimum number that must match."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int], ...] | None = None
    """Fixed lengths: pairs (first number of sequences, tokens of a draft). ``None``: the engine chooses."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise BadSetting(f"--speculative-config: there is no method {self.method!r}; use {' or '.join(METHODS)}.")
        if not 1 <= self.num_speculative_tokens <= MAX_DRAFT:
            raise BadSetting(
                f"--speculative-config: num_speculative_tokens is {self.num_speculative_tokens}; a draft has 1 to "
                f"{MAX_DRAFT} tokens."
            )
        if self.model is not None and self.method == MTP:
            raise BadSetting(
                f"--speculative-config: method {MTP} takes no model, because the MTP layer is in the target's own "
                f"checkpoint; leave {self.model!r} out."
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
        return HeadFormats(self.quantization, self.draft_lm_head)

    @property
    def is_head(self) -> bool:
        """The drafter is a model, a draft head."""
        return self.method != NGRAM


def parse_config(text: str | None) -> SpeculativeConfig | None:
    """Read the option's JSON. ``None``: nothing is drafted."""
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
    """The known keys, with values of the right types."""
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
    typed = dict(values)
    # As in vLLM, one of the two bounds is also the other one.
    for name, other in (("prompt_lookup_max", "prompt_lookup_min"), ("prompt_lookup_min", "prompt_lookup_max")):
        if name not in values and other in values:
            typed[name] = values[other]
    return typed


_LOOKUP = ("prompt_lookup_max", "prompt_lookup_min")
_STRINGS = ("method", "model", "draft_lm_head", "quantization")
_ARTICLE = {str: "a string", int: "a whole number"}

_RANGE = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?", re.ASCII)


def parse_lengths(key: str, value: Any) -> tuple[tuple[int, int], ...]:
    """Lengths of drafts by the number of sequences, as vLLM writes them: ``{"1-16": 3, "17-512": 0}`` or the list
    ``[[1, 16, 3], [17, 512, 0]]``. As in vLLM, numbers between two ranges and after the last one belong to the range
    before them, so only the first number of a range matters."""
    entries = _entries(value)
    ranges = sorted(entries) if entries and all(map(_is_range, entries)) else []
    apart = all(before[-2] < after[0] for before, after in pairwise(ranges))
    if not ranges or not apart:
        raise BadSetting(
            f"--speculative-config: {key} is {str(value)[:80]}, not ranges of sequences that do not overlap, each with "
            f'the tokens of a draft, 0 to {MAX_DRAFT}: {{"1-16": 3, "17-512": 0}}.'
        )
    return tuple((entry[0], entry[-1]) for entry in ranges)


def _entries(value: Any) -> list[list[Any]]:
    if isinstance(value, dict):
        return [[*_sizes(key), count] for key, count in value.items()]
    return [entry if isinstance(entry, list) else [None] for entry in value] if isinstance(value, list) else []


def _sizes(key: str) -> list[Any]:
    """The numbers of ``1-16`` or ``1``."""
    return [int(part) for part in key.split("-")] if _RANGE.fullmatch(key) else [None]


def _is_range(entry: Sequence[Any]) -> bool:
    """First and last number of sequences, or one number, and the tokens of a draft."""
    numbers = all(isinstance(number, int) and not isinstance(number, bool) for number in entry)
    return numbers and len(entry) in (2, 3) and 1 <= entry[0] <= entry[-2] and 0 <= entry[-1] <= MAX_DRAFT
