"""Requests of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from microscale.server.requests.body import Only
from microscale.server.requests.chat import ChatFields
from microscale.server.requests.fields import CHAT_MARKS, ONLY, unset_if_minus_one
from microscale.server.requests.response_format import StructuredFields
from microscale.server.requests.sampling import SamplingFields


class ChatRequest(SamplingFields, StructuredFields, ChatFields):
    """``/v1/chat/completions``."""

    HARMLESS = CHAT_MARKS
    # Of the two kinds of completion this one has no prompt of its own to tell of.
    ONLY: ClassVar[Mapping[str, Only]] = {**ONLY, "prompt_logprobs": Only((), "/v1/completions has it")}

    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(unset_if_minus_one)] = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
