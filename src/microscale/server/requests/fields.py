"""Types of fields that several APIs share, and the keys that are known without being read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from microscale.server.requests.body import MANY, Only

MARKS: Mapping[str, str] = {
    "user": "names who asks; nothing here depends on it",
    "safety_identifier": "names who asks",
    "metadata": "is for the client's own records",
    "store": "nothing of a chat is stored",
    "service_tier": "there is one tier",
    "prediction": "is a hint for speed",
    "prompt_cache_key": "is a hint; prefixes are found by their content",
    "prompt_cache_options": "is a hint",
    "prompt_cache_retention": "is a hint",
    "spaces_between_special_tokens": "no spaces are put anywhere",
}
"""Harmless whatever the value, with the reason."""
CHAT_MARKS: Mapping[str, str] = {**MARKS, "add_special_tokens": "a chat's prompt begins as its format says"}

ONLY: Mapping[str, Only] = {
    "best_of": Only((1,), "every choice is returned, so the best of several is not picked; use n"),
    "suffix": Only(("",), "the model continues a text and cannot fill a gap in it"),
    "modalities": Only((["text"],), "text is all that the model writes"),
    "audio": Only((), "this model writes text only"),
    "functions": Only(([],), "send tools instead"),
    "function_call": Only(("none", "auto"), "send tool_choice instead"),
    "chat_template": Only((), "a template is part of the model and not of a request"),
    "use_beam_search": Only((False,), "tokens are sampled"),
    "logits_processors": Only(([],), "a request brings no code"),
    "bad_words": Only(([],), "use logit_bias"),
    "allowed_token_ids": Only(([],), "use logit_bias or guided_choice"),
    "truncate_prompt_tokens": Only((), "a prompt is taken whole"),
    "length_penalty": Only((1, 1.0), "it belongs to beam search"),
    "typical_p": Only((1, 1.0, 0, 0.0), "use top_p, top_k or min_p"),
    "mirostat": Only((0,), "use top_p, top_k or min_p"),
    "dry_multiplier": Only((0, 0.0), "use repetition_penalty"),
    "xtc_probability": Only((0, 0.0), "use top_p, top_k or min_p"),
}
"""Keys that are accepted only with these values, which ask for what is done anyway."""


Token = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(max_length=MANY, fail_fast=True)]


def _few(value: object) -> object:
    """Dictionaries cannot fail at their first fault, so they are counted first."""
    if isinstance(value, dict) and len(value) > MANY:
        raise PydanticCustomError("too_long", "has more than {most} entries", {"most": MANY})
    return value


# Keys of JSON are strings.
Bias = Annotated[dict[Annotated[Token, Field(strict=False)], float], BeforeValidator(_few)]


def unset_if_minus_one(value: object) -> object:
    """llama.cpp's users write -1 for "not set"."""
    return None if value == -1 and type(value) is int else value


def only_text(value: object) -> object:
    """Validates the type of a message's part. Types of text end in ``text``; all others are refused."""
    if isinstance(value, str) and not value.endswith("text"):
        raise PydanticCustomError("unsupported_value", "is {kind}: this model reads text only", {"kind": value[:64]})
    return value


Name = Annotated[str, Field(max_length=256)]
"""Of a call or a function, as others have given it."""
