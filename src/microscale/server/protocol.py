"""Requests of OpenAI's API, and the fields that other servers' clients add to it.

What is not read here is passed over or refused; see ``body``. Values are bounded by ``Limits`` and checked by
``SamplingParams``; here stand names and types.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from microscale.server.body import MANY, Body, Only

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
"""Known, and not to be had but with these values, which ask for what is done anyway."""


class StreamOptions(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"include_obfuscation": "events are not padded"}

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: every chunk carries the usage so far."""


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


def _unset(value: object) -> object:
    """llama.cpp's users write -1 for "not set"."""
    return None if value == -1 and type(value) is int else value


class SamplingFields(Body):
    """What the two kinds of completion share."""

    HARMLESS = MARKS
    ONLY = ONLY

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_unset)] = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None
    """The same under llama.cpp's name."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Bias | None = None
    seed: Annotated[int | None, BeforeValidator(_unset)] = None
    stop: str | Strings | None = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    """False shows the output as the model wrote it, control tokens by name, and for a chat unparsed."""
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_prompt: bool | None = None
    """False: neither take from the prefix cache nor leave anything in it for others."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None

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
            raise PydanticCustomError("conflict", "is only there with stream: true", {"field": "stream_options"})
        return self


def _prompt_kind(value: object) -> str:
    """By the first element: to try every kind on a long list would take as many times as long."""
    if not isinstance(value, list):
        return "Text"
    first = value[0] if value else None
    return "Texts" if isinstance(first, str) else "Lists" if isinstance(first, list) else "Ids"


Prompt = Annotated[
    Annotated[str, Tag("Text")]
    | Annotated[Strings, Tag("Texts")]
    | Annotated[Tokens, Tag("Ids")]
    | Annotated[list[Tokens], Field(max_length=MANY, fail_fast=True), Tag("Lists")],
    Discriminator(_prompt_kind),
]


FORMATS = ("text", "json_object", "json_schema")


def _known_format(value: object) -> object:
    if value not in FORMATS:
        raise PydanticCustomError("literal_error", "must be one of {most}", {"most": ", ".join(FORMATS)})
    return value


class TextFormat(Body):
    # A format of an unknown type is read as this one, so the error names all that there are.
    type: Annotated[Literal["text"], BeforeValidator(_known_format)]


class JsonFormat(Body):
    type: Literal["json_object"]


class SchemaFields(Body):
    """A schema and what the model hears of it."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: SchemaFields


def format_kind(value: object) -> str:
    """By its type, under names that no path of an error shows."""
    kind = value.get("type") if isinstance(value, dict) else None
    return {"json_object": "Json", "json_schema": "Schema"}.get(kind if isinstance(kind, str) else "", "Text")


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("Text")] | Annotated[JsonFormat, Tag("Json")] | Annotated[SchemaFormat, Tag("Schema")],
    Discriminator(format_kind),
]


class StructuredOutputs(Body):
    """vLLM's."""

    ONLY: ClassVar[Mapping[str, Only]] = {"structural_tag": Only((), "use tools, or one of json, regex and grammar")}

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None


class StructuredFields(Body):
    """Forms that the answer must have: OpenAI's field, and the names that vLLM's clients know."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None


class CompletionRequest(SamplingFields, StructuredFields):
    """``/v1/completions``. A text prompt may hold control tokens by name: its format is the caller's."""

    HARMLESS: ClassVar[Mapping[str, str]] = {**MARKS, "parallel_tool_calls": "a raw prompt has no tools"}

    prompt: Prompt
    add_special_tokens: bool | None = None
    """False: nothing is put before a text prompt that its model expects there (Gemma's ``<bos>``)."""
    logprobs: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    """The prompt before the continuation; with ``logprobs`` its tokens too."""
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = None
    """vLLM's: the most likely tokens at each place of the prompt."""

    @model_validator(mode="after")
    def _nothing_needs_a_reason(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise PydanticCustomError(
                "conflict", "may be 0 only with echo or prompt_logprobs; else at least 1", {"field": "max_tokens"}
            )
        return self


def only_text(value: object) -> object:
    """For the type of a part of a message: the parts that are none of text have nothing else in common."""
    if isinstance(value, str) and not value.endswith("text"):
        raise PydanticCustomError("unsupported_value", "is {kind}: this model reads text only", {"kind": value[:64]})
    return value


class TextPart(Body):
    type: Annotated[Literal["text"], BeforeValidator(only_text)]
    text: str


Parts = Annotated[list[TextPart], Field(max_length=MANY, fail_fast=True)]


Name = Annotated[str, Field(max_length=256)]
"""Of a call or a function, as others have given it."""


class FunctionCall(Body):
    name: Name
    arguments: str


class PastCall(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"index": "calls stand in order"}

    id: Name
    type: Literal["function"] = "function"
    function: FunctionCall


TextOrParts = Annotated[
    Annotated[str, Tag("Text")] | Annotated[Parts, Tag("Parts")],
    Discriminator(lambda value: "Parts" if isinstance(value, list) else "Text"),
]
Content = TextOrParts | None
ECHOED: Mapping[str, str] = {
    "annotations": "is returned by other servers and sent back",
    "refusal": "is returned by other servers and sent back",
    "flaws": "is what we returned",
    "token_ids": "is what we returned",
}


class Instruction(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {"name": "turns have no names"}

    role: Literal["system", "developer", "user"]
    content: TextOrParts


class AssistantMessage(Body):
    HARMLESS: ClassVar[Mapping[str, str]] = {**ECHOED, "name": "turns have no names"}

    role: Literal["assistant"]
    content: Content = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MANY, fail_fast=True)] | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: TextOrParts
    tool_call_id: Name | None = None
    name: Name | None = None


ChatMessage = Annotated[Instruction | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Verbosity = Literal["low", "medium", "high"]


class TemplateOptions(Body):
    """vLLM's ``chat_template_kwargs``: those that a model here has. The others are passed over."""

    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None


class ChatFields(Body):
    """What becomes a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MANY, fail_fast=True)]
    tools: Annotated[list[ToolSpec], Field(max_length=MANY, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    """False: the turn ends with its first call."""
    reasoning_effort: ReasoningEffort | None = None
    verbosity: Verbosity | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """The last message is the assistant's and not yet complete: the answer goes on where it stops."""

    @model_validator(mode="after")
    def _one_ending(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "conflict", "and add_generation_prompt cannot both be true", {"field": "continue_final_message"}
            )
        return self


class ChatRequest(SamplingFields, StructuredFields, ChatFields):
    """``/v1/chat/completions``."""

    HARMLESS = CHAT_MARKS
    # Of the two kinds of completion this one has no prompt of its own to tell of.
    ONLY: ClassVar[Mapping[str, Only]] = {**ONLY, "prompt_logprobs": Only((), "/v1/completions has it")}

    max_completion_tokens: Annotated[Annotated[int, Field(ge=1)] | None, BeforeValidator(_unset)] = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None


class TokenizeText(Body):
    HARMLESS = MARKS

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChat(ChatFields):
    HARMLESS = CHAT_MARKS

    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    HARMLESS = MARKS

    model: str | None = None
    tokens: Tokens
