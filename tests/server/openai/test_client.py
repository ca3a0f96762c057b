"""The ``openai`` client against a running server: what users get."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from support.live_server import CONTEXT, MODEL, SEEDS, TURNS, scripts
from support.scripted_service import NOT_FINITE, REFUSE
from support.tiny_tokenizers import tiny

ASK: list[Any] = [{"role": "user", "content": "What is 2 + 2?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
THOUGHT = "Let me think: naïve 👩‍👧."
ANSWER = "The answer is 4. 日本"


def ids_of(name: str) -> list[int]:
    return scripts(tiny())[SEEDS[name]]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL, "other-name"]
    assert client.models.retrieve("other-name").id == "other-name"


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=ASK, seed=SEEDS["answer"])
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == (ANSWER, "stop")
    extra = choice.message.model_extra or {}
    assert extra["reasoning"] == extra["reasoning_content"] == THOUGHT
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(ids_of("answer"))
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens // 2
    assert "flaws" not in (choice.model_extra or {})


def test_chat_stream_has_every_token_id_on_one_chunk(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        seed=SEEDS["answer"],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_token_ids": True},
    )
    chunks = list(stream)
    *shown, last = chunks
    assert last.choices == []
    assert last.usage is not None
    deltas = [chunk.choices[0].delta for chunk in shown]
    assert "".join(delta.content or "" for delta in deltas) == ANSWER
    for name in ("reasoning", "reasoning_content"):
        assert "".join((delta.model_extra or {}).get(name, "") for delta in deltas) == THOUGHT
    ids = [token for chunk in shown for token in (chunk.choices[0].model_extra or {})["token_ids"]]
    assert ids == ids_of("answer")
    # The first chunk is the first token's, a header's: a client times prefill by it.
    assert (shown[0].choices[0].model_extra or {})["token_ids"] == ids[:1]
    assert [delta.role for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert [chunk.choices[0].finish_reason for chunk in shown] == [*[None] * (len(shown) - 1), "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert last.usage.completion_tokens == len(ids)
    assert last.usage.completion_tokens_details is not None
    assert 0 < (last.usage.completion_tokens_details.reasoning_tokens or 0) < len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_and_its_result(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [WEATHER], "seed": SEEDS["call"]}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    calls = choice.message.tool_calls
    assert calls is not None
    call = calls[0]
    assert len(calls) == 1
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Paris"}')
    # What was returned can be sent back as it is.
    sent = choice.message.model_dump(exclude={"parsed"}, exclude_none=True)
    for past in sent["tool_calls"]:
        past["function"].pop("parsed_arguments", None)
    turn = [*ASK, sent, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    reply = client.chat.completions.create(model=MODEL, messages=turn, tools=[WEATHER], seed=SEEDS["answer"])
    assert reply.choices[0].message.content == ANSWER


def test_a_call_that_was_not_offered_stays_text(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, tools=[WEATHER], tool_choice="none", seed=SEEDS["call"]
    )
    choice = reply.choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == '{"city": "Paris"}'
    assert "unknown_tool" in (choice.model_extra or {})["flaws"]


@pytest.mark.parametrize(("script", "content"), [("no header", "Just text."), ("only thoughts", "")])
def test_malformed_output_is_never_null(client: openai.OpenAI, script: str, content: str) -> None:
    choice = client.chat.completions.create(model=MODEL, messages=ASK, seed=SEEDS[script]).choices[0]
    assert choice.message.content == content
    assert (choice.model_extra or {})["flaws"]


def test_more_tokens_than_fit_are_clamped(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, max_completion_tokens=131072, seed=SEEDS["answer"], reasoning_effort="high"
    )
    assert reply.choices[0].message.content == ANSWER


def test_a_prompt_that_is_too_long_is_told_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"5000 tokens.*4096"):
        client.completions.create(model=MODEL, prompt=[5] * 5000)
    fits = client.completions.create(model=MODEL, prompt=[5] * (CONTEXT - 1), max_tokens=50)
    assert fits.usage is not None
    assert fits.usage.completion_tokens == 1


def test_one_token_is_an_answer(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=1, seed=SEEDS["answer"])
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content == ""
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 1


def test_chat_logprobs_align_with_the_text_that_they_are_of(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, seed=SEEDS["answer"], logprobs=True, top_logprobs=2
    )
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == ANSWER
    thought = logprobs.model_extra["reasoning"]  # type: ignore[index]
    assert b"".join(bytes(entry["bytes"]) for entry in thought).decode() == THOUGHT


def test_completion_of_text_and_of_ids(client: openai.OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="say it again", max_tokens=500)
    ids = client.completions.create(model=MODEL, prompt=tiny().encode("say it again"), max_tokens=500)
    assert text.choices[0].text == ids.choices[0].text
    assert text.choices[0].text.startswith("say it againsay it again")
    assert text.choices[0].finish_reason == "length"
    assert text.usage is not None
    assert text.usage.completion_tokens == 500


def test_completion_choices_and_prompts(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt=["first", "second"], n=2, max_tokens=len(tiny().encode("first"))
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices][:2] == ["first", "first"]
    assert all("second".startswith(choice.text) for choice in reply.choices[2:])


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string(client: openai.OpenAI, stream: bool) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 300, "seed": SEEDS["plain"], "stop": ["STOP"]}
    if stream:
        choices = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
    else:
        choices = client.completions.create(**asked).choices
    assert "".join(choice.text for choice in choices) == "one two "
    assert choices[-1].finish_reason == "stop"
    assert (choices[-1].model_extra or {})["stop_reason"] == "STOP"


def test_completion_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt="x", max_tokens=4, seed=SEEDS["plain"], logprobs=1)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == reply.choices[0].text
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset is not None
    starts = zip(logprobs.text_offset, logprobs.tokens, strict=True)
    assert all(reply.choices[0].text.startswith(token, at) for at, token in starts)


def test_errors_have_the_clients_classes(client: openai.OpenAI) -> None:
    def ask(**options: Any) -> Any:
        return client.chat.completions.create(**({"model": MODEL, "messages": ASK} | options))

    with pytest.raises(openai.RateLimitError) as refused:
        ask(seed=REFUSE)
    assert refused.value.response.headers["retry-after"] == "1"
    with pytest.raises(openai.NotFoundError, match="other-model"):
        ask(model="other-model")
    with pytest.raises(openai.BadRequestError, match="this model writes only text") as wrong:
        ask(audio={"voice": "alloy", "format": "wav"})
    assert (wrong.value.param, wrong.value.code) == ("audio", "unsupported_parameter")
    with pytest.raises(openai.InternalServerError, match="not finite"):
        ask(seed=NOT_FINITE)
    with pytest.raises(openai.APIError, match="not finite"):
        list(ask(seed=NOT_FINITE, stream=True))
    assert ask(seed=SEEDS["answer"]).choices[0].message.content == ANSWER


def test_the_scripts_are_whole() -> None:
    """The tests above compare with what was written here, so it must survive the tokenizer."""
    for turn, ids in zip(TURNS.values(), scripts(tiny()), strict=True):
        assert tiny().decode(ids, show_control=True) == turn
