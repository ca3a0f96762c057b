"""How to sample, stop and stream: OpenAI's fields, and those of other servers' clients.

Only names and types are defined here; ``RequestLimits`` and ``SamplingParams`` check the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.requests.base import Body
from microscale.server.requests.fields import MARKS, ONLY, Bias, Strings, Tokens, unset_if_minus_one


class StreamOptions(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"include_obfuscation": "events are not padded"}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """A field of vLLM: every chunk carries the usage so far."""


class CommonSampling(Body):
    """The sampling fields that all APIs have under the same names."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stream: bool | None = None
    cache_prompt: bool | None = None
    """If false, the prefix cache is neither used nor filled."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

    def sampling(self, **others: Any) -> SamplingFields:
        """These fields and ``others``, which other APIs call differently."""
        return SamplingFields(**{name: getattr(self, name) for name in CommonSampling.model_fields}, **others)


class SamplingFields(CommonSampling):
    """All sampling fields. Every API's request is converted to these."""

    HARMLESS = MARKS
    ONLY = ONLY

    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(unset_if_minus_one)] = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    repeat_penalty: float | None = None
    """llama.cpp's name for ``repetition_penalty``."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    seed: Annotated[int | None, BeforeValidator(unset_if_minus_one)] = None
    stop: str | Strings | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    """If false, the output is shown as the model wrote it, with control tokens by name; a chat's is not parsed."""
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def usage_on_every_chunk(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.include_usage and options.continuous_usage_stats)

    @model_validator(mode="after")
    def _options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("conflict", "requires stream: true", {"field": "stream_options"})
        return self
