"""The texts of the server's errors, and the status of each where that is not 400.

Errors of the engine, such as a full queue, have their text where the engine raises them. They get their status in
``http/error_replies.py``, which also makes the JSON; ``anthropic/error_replies.py`` does that for Anthropic's clients.
Why a field or a value is not supported is written next to that field, in the ``ONLY`` tables of the request models
(``requests/fields.py`` and each API's request module).
"""

from __future__ import annotations

from collections.abc import Sequence

from microscale.errors import BadLogits, BadRequest, Draining, MicroscaleError, QueueFull

# ---- classes ---------------------------------------------------------------------------------------------------------


class BadField(BadRequest):
    """A field of a request is wrong; ``param`` names it, as in OpenAI's errors."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        """OpenAI's code, where it has one for this error."""


class RequestError(MicroscaleError):
    """An error with an HTTP status of its own. ``kind`` and ``code`` are OpenAI's ``type`` and ``code``."""

    def __init__(
        self, message: str, status: int, code: str, param: str | None = None, kind: str = "invalid_request_error"
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind


class SlowReader(RequestError):
    """The client reads too slowly; its connection is closed."""


# ---- the server ------------------------------------------------------------------------------------------------------


def internal(error: Exception) -> MicroscaleError:
    return MicroscaleError(f"Internal server error: {type(error).__name__}.")


def shutting_down() -> Draining:
    return Draining("The server is shutting down and accepts no new requests.")


def too_many_waiting(limit: int) -> QueueFull:
    return QueueFull(f"The engine is being started again and {limit} requests wait for it already; try again later.")


def too_many_of_client(limit: int) -> QueueFull:
    return QueueFull(f"You have {limit} requests open already, which is the maximum; wait until one has ended.")


def cut_off_by_shutdown() -> Draining:
    return Draining("The server shut down before this answer was complete.")


def failed_in_engine() -> BadLogits:
    return BadLogits("The engine could not complete this request.")


def slow_reader(num_tokens: int) -> SlowReader:
    return SlowReader(f"The client is {num_tokens} tokens behind.", 408, "slow_reader")


def api_key_missing() -> RequestError:
    return RequestError(
        "The API key is missing or wrong. Send it in the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        401,
        "invalid_api_key",
        kind="authentication_error",
    )


def host_not_allowed(name: str) -> RequestError:
    return not_allowed(
        f"Without API keys, this server answers only to localhost on this machine, not to {name[:64]!r}. "
        "Allow that name with --allowed-host."
    )


def keyless_from_elsewhere() -> RequestError:
    return not_allowed(
        "Without API keys, this server answers only requests from its own machine. Give the application api_key_file, "
        "or set allow_without_key."
    )


def not_allowed(message: str) -> RequestError:
    return RequestError(message, 403, "host_not_allowed", kind="permission_error")


def model_not_found(name: str, served: Sequence[str]) -> RequestError:
    return RequestError(
        f"The model {name[:200]!r} is not served here. Available: {', '.join(served)}.", 404, "model_not_found"
    )


# ---- bodies ----------------------------------------------------------------------------------------------------------


def not_json() -> RequestError:
    return RequestError("Send the body as JSON with the header 'Content-Type: application/json'.", 415, "not_json")


def unknown_encoding(encoding: str) -> RequestError:
    text = f"Content-Encoding {encoding[:32]!r} is not supported; use gzip or none."
    return RequestError(text, 415, "unknown_encoding")


def body_timeout(limit_s: float) -> RequestError:
    return RequestError(f"The body did not arrive within {limit_s:g} s.", 408, "body_timeout")


def body_too_large(limit: int) -> RequestError:
    return RequestError(f"The body has more than {limit} bytes, which is the maximum.", 413, "body_too_large")


def bad_gzip(reason: str) -> BadField:
    return BadField(f"The body is not valid gzip: {reason}.", None)


def unreadable_body(reason: str) -> BadField:
    return BadField(f"The body cannot be parsed: {reason}.", None)


# ---- fields ----------------------------------------------------------------------------------------------------------


def too_many(what: str, count: int, limit: int, param: str) -> BadField:
    return BadField(f"There are {count} {what}; the maximum is {limit}.", param)


def too_long(param: str, size: int, unit: str, limit: int) -> BadField:
    return BadField(f"{param} has {size} {unit}; the maximum is {limit}.", param)


def too_deep(param: str, limit: int) -> BadField:
    return BadField(f"{param} is nested more than {limit} levels deep.", param)


def empty(param: str) -> BadField:
    return BadField(f"{param} is empty.", param)


def out_of_range(param: str, allowed: str) -> BadField:
    return BadField(f"{param} must be {allowed}.", param)


def needs(param: str, other: str) -> BadField:
    return BadField(f"{param} requires {other}.", param)


def unknown_field(param: str) -> BadField:
    return BadField(f"{param}: this field is not supported.", param, "unknown_parameter")


def not_readable(param: str) -> BadField:
    return BadField(f"{param}: nothing in it can be given to the model.", param)


def wrong_block(param: str, role: str, kind: str) -> BadField:
    return BadField(f"{param}: a message with the role {role!r} cannot contain a {kind!r} block.", param)


def context_length_exceeded(num_tokens: int, limit: int) -> BadField:
    # Clients look for the words "maximum context length".
    return BadField(
        f"The prompt has {num_tokens} tokens, but this model's maximum context length is {limit} tokens, including the "
        "answer. Shorten the prompt.",
        "prompt",
        "context_length_exceeded",
    )


def anthropic_context_length_exceeded(num_tokens: int, limit: int) -> BadField:
    # Claude Code recognises these exact words, and shortens the conversation.
    return BadField(f"prompt is too long: {num_tokens} tokens > {limit} maximum", "messages", "context_length_exceeded")


def token_not_in_vocabulary(token: int, size: int) -> BadField:
    return BadField(f"tokens: {token} is not in the vocabulary, which has {size} tokens.", "tokens")


def min_tokens_above_max(least: int, most: int) -> BadField:
    return BadField(f"min_tokens ({least}) is larger than max_tokens ({most}).", "min_tokens")


# ---- tools -----------------------------------------------------------------------------------------------------------


def duplicate_tool(at: int, first: int) -> BadField:
    return BadField(f"tools[{at}] has the same name as tools[{first}].", "tools")


def no_tools_to_choose() -> BadField:
    return BadField("tool_choice requires a call, but there are no tools.", "tool_choice")


def tool_not_in_tools(param: str, name: str) -> BadField:
    return BadField(f"{param} names {name[:64]!r}, which is not in tools.", param)


def tool_choice_without_name(param: str) -> BadField:
    return BadField(f"{param} has no name.", param)


def tool_not_callable(param: str, kind: str) -> BadField:
    return BadField(
        f"{param}: tools of the type {kind[:64]!r} do not run here. Functions, custom tools and the client's own shell "
        "can be called.",
        param,
        "unsupported_value",
    )


def hosted_tool_chosen(name: str) -> BadField:
    return BadField(
        f"tool_choice names {name[:64]!r}, which does not run here. Only tools with an input_schema can be called.",
        "tool_choice",
    )


# ---- structured output -----------------------------------------------------------------------------------------------


def two_formats(first: str, second: str) -> BadField:
    return BadField(f"{first} and {second} both set the output format; send only one.", second)


def conflicts_with_format(param: str) -> BadField:
    return BadField(f"{param} cannot be combined with structured output or a required tool call.", param)


def cannot_be_strict(param: str, reason: str) -> BadField:
    return BadField(f"{param} is not possible: {reason}.", param)


def invalid_schema(param: str, reason: object) -> BadField:
    return BadField(f"{param} is not a JSON schema: {reason}.", param)


def invalid_ebnf(param: str, reason: str) -> BadField:
    return BadField(f"{param} is not an EBNF grammar: {reason[:200]}.", param)


def grammar_rejected(param: str, reason: str) -> BadField:
    return BadField(f"{param}: {reason}", param)


def grammar_queue_full(limit: int) -> QueueFull:
    return QueueFull(f"{limit} requests are already waiting for their grammars to compile; try again later.")


def grammar_worker_failed(reason: str = "") -> MicroscaleError:
    return MicroscaleError(f"The process that compiles grammars did not start{reason}.")


# ---- stored responses ------------------------------------------------------------------------------------------------


def response_not_found(response_id: str) -> RequestError:
    return RequestError(f"The response {response_id[:64]!r} is not stored, or no longer.", 404, "response_not_found")


def previous_response_not_found(reason: RequestError) -> RequestError:
    param = "previous_response_id"
    return RequestError(f"{param}: {reason}", 404, "previous_response_not_found", param)


def item_not_found(item_id: str) -> RequestError:
    return RequestError(
        f"The item {item_id[:64]!r} is not stored, or no longer. Items are stored with their response, unless the "
        "request has 'store: false'.",
        404,
        "item_not_found",
        "input",
    )


def item_not_in_response(item_id: str) -> RequestError:
    return RequestError(f"after: the response has no input item {item_id[:64]!r}.", 404, "item_not_found", "input")


def stored_response_not_streamed(param: str, code: str) -> BadField:
    return BadField(f"{param}: a stored response cannot be streamed; it is returned whole.", param, code)


def nothing_to_cancel() -> BadField:
    return BadField(
        "Only background responses can be cancelled, and this server has none. Close the connection instead.",
        None,
        "unsupported_value",
    )
