"""Field types that several APIs share, and tables of keys that are known but not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from microscale.server.requests.base import MANY, Only

MARKS: Mapping[str, str] = {
    "user": "identifies the user; nothing depends on it",
    "safety_identifier": "identifies the user",
    "metadata": "is for the client's own records",
    "store": "chats are not stored",
    "service_tier": "there is only one tier",
    "prediction": "is a hint for speed",
    "prompt_cache_key": "is a hint; prefixes are matched by content",
    "prompt_cache_options": "is a hint",
    "prompt_cache_retention": "is a hint",
    "spaces_between_special_tokens": "no spaces are inserted",
}
"""Keys that are harmless whatever their value, with the reason."""
CHAT_MARKS: Mapping[str, str] = {**MARKS, "add_special_tokens": "the chat format decides how a prompt begins"}

ONLY: Mapping[str, Only] = {
    "best_of": Only((1,), "all choices are returned; use n"),
    "suffix": Only(("",), "the model can continue a text but not fill a gap"),
    "modalities": Only((["text"],), "this model writes only text"),
    "audio": Only((), "this model writes only text"),
    "functions": Only(([],), "send tools instead"),
    "function_call": Only(("none", "auto"), "send tool_choice instead"),
    "chat_template": Only((), "the template is part of the model, not of a request"),
    "use_beam_search": Only((False,), "beam search is not available"),
    "logits_processors": Only(([],), "requests cannot contain code"),
    "bad_words": Only(([],), "use logit_bias"),
    "allowed_token_ids": Only(([],), "use logit_bias or guided_choice"),
    "truncate_prompt_tokens": Only((), "prompts are not truncated"),
    "length_penalty": Only((1, 1.0), "it belongs to beam search"),
    "typical_p": Only((1, 1.0, 0, 0.0), "use top_p, top_k or min_p"),
    "mirostat": Only((0,), "use top_p, top_k or min_p"),
    "dry_multiplier": Only((0, 0.0), "use repetition_penalty"),
    "xtc_probability": Only((0, 0.0), "use top_p, top_k or min_p"),
}
"""Keys that are accepted only with these values, which change nothing, and the reason."""


Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(max_length=MANY, fail_fast=True)]


def _few(value: object) -> object:
    """Dictionaries cannot fail at their first error, so their entries are counted first."""
    if isinstance(value, dict) and len(value) > MANY:
        raise PydanticCustomError("too_long", "has more than {most} entries", {"most": MANY})
    return value


# JSON keys are strings.
Bias = Annotated[dict[Annotated[Token, Field(strict=False)], float], BeforeValidator(_few)]


def unset_if_minus_one(value: object) -> object:
    """Clients of llama.cpp send -1 for "not set"."""
    return None if value == -1 and type(value) is int else value


def only_text(value: object) -> object:
    """Validates the type of a message's part: text types end in ``text``, all others are refused."""
    if isinstance(value, str) and not value.endswith("text"):
        raise PydanticCustomError("unsupported_value", "is {kind}; this model reads only text", {"kind": value[:64]})
    return value


Name = Annotated[str, Field(max_length=256)]
"""The name or id of a call or a function, from other software."""
