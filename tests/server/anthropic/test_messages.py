"""``/v1/messages`` through the ``anthropic`` client: blocks, events, thinking, tools there and back."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2 as httpx
import pytest

from support.anthropic_client import ASK, THINKING, WEATHER, asked, create, stream
from support.live_server import KEY, MODEL, SEEDS, Live

THOUGHT = "Let me think: naïve 👩‍👧."
ANSWER = "The answer is 4. 日本"


def both(client: anthropic.Anthropic, script: str, **options: Any) -> Any:
    """The message at once, after the stream was seen to build the same."""
    whole = create(client, script, **options)
    _, built = stream(client, script, **options)
    assert [plain(block) for block in built.content] == [plain(block) for block in whole.content]
    assert (built.stop_reason, built.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    if whole.stop_sequence is None:  # else those count too that the engine has made before it was told to stop
        assert built.usage.output_tokens == whole.usage.output_tokens
    return whole


def plain(block: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in block.model_dump().items()
        if value is not None and name not in ("id", "signature", "parsed_output")
    }


def kinds(message: Any) -> list[str]:
    return [block.type for block in message.content]


# ---- messages --------------------------------------------------------------------------------------------------------


def test_a_message(client: anthropic.Anthropic) -> None:
    reply = both(client, "answer", system="Be brief.")
    assert [plain(block) for block in reply.content] == [{"type": "text", "text": ANSWER}]
    assert (reply.type, reply.role, reply.model) == ("message", "assistant", MODEL)
    assert (reply.stop_reason, reply.stop_sequence) == ("end_turn", None)
    assert reply.id.startswith("msg_")
    usage = reply.usage
    # The scripted engine finds half of each prompt in its cache.
    assert 0 <= usage.input_tokens - usage.cache_read_input_tokens <= 1
    assert usage.cache_creation_input_tokens == 0
    assert 0 < usage.output_tokens_details.thinking_tokens < usage.output_tokens


def test_events_come_in_order(client: anthropic.Anthropic) -> None:
    raw = list(client.messages.create(**asked("answer", {"thinking": THINKING, "stream": True})))
    names = [(getattr(event, "delta", None) and getattr(event.delta, "type", None)) or event.type for event in raw]
    once = [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
    block = ["content_block_start", "content_block_stop"]
    assert once == [
        "message_start",
        *(block[0], "thinking_delta", "signature_delta", block[1]),
        *(block[0], "text_delta", block[1]),
        "message_delta",
        "message_stop",
    ]
    begun = raw[0].message
    assert (begun.content, begun.stop_reason) == ([], None)
    assert begun.usage.input_tokens + begun.usage.cache_read_input_tokens > 0
    end = raw[-2].usage
    assert (end.input_tokens, end.cache_read_input_tokens) == (
        begun.usage.input_tokens,
        begun.usage.cache_read_input_tokens,
    )
    assert [event.index for event in raw if event.type == "content_block_start"] == [0, 1]


def test_the_stream_and_its_text(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**asked("answer", {})) as events:
        assert "".join(events.text_stream) == ANSWER
        assert events.get_final_message().stop_reason == "end_turn"


def test_cut_off_and_stop_sequences(client: anthropic.Anthropic) -> None:
    cut = both(client, "answer", max_tokens=34)
    assert cut.stop_reason == "max_tokens"
    assert cut.usage.output_tokens == 34
    assert ANSWER.startswith(cut.content[0].text)
    stopped = both(client, "stop", stop_sequences=["nothing", "STOP"])
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (
        "one two ",
        "stop_sequence",
        "STOP",
    )


def test_more_tokens_than_fit_are_cut_to_what_does(client: anthropic.Anthropic) -> None:
    assert create(client, "answer", max_tokens=2**40).stop_reason == "end_turn"
    # Without a seed the prompt is said again, for ever.
    endless = client.messages.create(model=MODEL, max_tokens=1_000_000, messages=ASK)
    assert endless.stop_reason == "model_context_window_exceeded"
    usage = endless.usage
    assert usage.cache_read_input_tokens is not None
    assert usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens == 4096


def test_no_tokens_at_all_only_read_the_prompt(client: anthropic.Anthropic) -> None:
    reply = both(client, "answer", max_tokens=0)
    assert (reply.content, reply.stop_reason, reply.usage.output_tokens) == ([], "max_tokens", 0)


def test_a_prefill_is_continued(client: anthropic.Anthropic) -> None:
    said = [*ASK, {"role": "assistant", "content": "The best answer is ("}]
    reply = both(client, "continued", messages=said)
    assert (reply.content[0].text, reply.model_extra) == ("and so on.", {})
    assert create(client, "continued").model_extra["flaws"] == ["no_header", "no_channel"]


# ---- thinking --------------------------------------------------------------------------------------------------------


def test_thinking_comes_back_if_it_is_asked_for(client: anthropic.Anthropic) -> None:
    reply = both(client, "answer", thinking={"type": "enabled", "budget_tokens": 1024})
    assert kinds(reply) == ["thinking", "text"]
    assert reply.content[0].thinking == THOUGHT
    other = create(client, "answer", thinking=THINKING)
    assert len({reply.content[0].signature, other.content[0].signature, ""}) == 3
    assert kinds(both(client, "answer", thinking={"type": "disabled"})) == ["text"]
    assert both(client, "only thoughts").content == []


def test_omitted_thinking_is_carried_by_its_signature(client: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"thinking": {"type": "adaptive", "display": "omitted"}, "tools": [WEATHER]}
    call = both(client, "call", **options)
    assert (kinds(call), call.content[0].thinking) == (["thinking", "tool_use"], "")
    result = {"type": "tool_result", "tool_use_id": call.content[-1].id, "content": "Rain."}
    after = [*ASK, call.to_param(), {"role": "user", "content": [result]}]
    without = [*ASK, {"role": "assistant", "content": [call.content[-1]]}, after[-1]]
    counted = [
        client.messages.count_tokens(model=MODEL, messages=said, **options).input_tokens for said in (after, without)
    ]
    assert counted[0] > counted[1], "the model does not hear what it thought"


def test_hidden_thinking_keeps_the_stream_alive(server: Live) -> None:
    body = asked("answer", {"stream": True})
    body |= body.pop("extra_body")
    for _ in range(20):
        reply = httpx.post(f"{server.v1}/messages", json=body, headers={"x-api-key": KEY})
        assert THOUGHT[:3] not in reply.text
        assert reply.text.startswith("event: message_start\n")
        if ":\n\n" in reply.text:
            return
    pytest.fail("no sign of life")  # a busy server may have thoughts and answer at once, but not every time


# ---- tools -----------------------------------------------------------------------------------------------------------


def test_a_tool_there_and_back(client: anthropic.Anthropic) -> None:
    call = both(client, "call", tools=[WEATHER], thinking=THINKING)
    thought, use = call.content
    assert (thought.thinking, use.name, use.input) == ("I need the weather.", "get_weather", {"city": "Paris"})
    assert (call.stop_reason, use.id[:6]) == ("tool_use", "toolu_")
    parts = [{"type": "text", "text": "Rain,"}, {"type": "text", "text": "and wind."}]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": parts}
    said = [*ASK, call.to_param(), {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
    assert create(client, "answer", messages=said, tools=[WEATHER]).content[0].text == ANSWER
    lost = [*ASK, {"role": "user", "content": [result | {"tool_use_id": "toolu_unknown"}]}]
    with pytest.raises(anthropic.BadRequestError, match="toolu_unknown"):
        create(client, "answer", messages=lost)


def test_blocks_of_one_turn(client: anthropic.Anthropic) -> None:
    reply = both(client, "preamble", tools=[WEATHER], thinking=THINKING)
    assert [plain(block) for block in reply.content] == [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "I look it up."},
        {"type": "thinking", "thinking": "Now."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}},
    ]


@pytest.mark.parametrize(
    ("script", "input_"),
    [("broken", {"INVALID_JSON": '{"city": '}), ("no object", {"INVALID_JSON": '["Paris"]'}), ("no input", {})],
)
def test_input_that_is_no_object(client: anthropic.Anthropic, script: str, input_: dict[str, str]) -> None:
    reply = both(client, script, tools=[WEATHER])
    assert reply.content[0].input == input_
    assert ("malformed_tool_input" in reply.model_extra.get("flaws", [])) == bool(input_)
    # What was returned can be handed back.
    result = {"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "No.", "is_error": True}
    said = [*ASK, reply.to_param(), {"role": "user", "content": [result]}]
    assert create(client, "answer", messages=said, tools=[WEATHER]).stop_reason == "end_turn"


def test_input_is_streamed_as_it_is_written_only_on_request(client: anthropic.Anthropic) -> None:
    for eager in (False, True):
        tools = [WEATHER | {"eager_input_streaming": eager}]
        events, final = stream(client, "call", tools=tools, extra={"priority": 30})
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        assert "".join(pieces) == '{"city": "Paris"}'
        assert (len(pieces) > 1) == eager
        assert final.content[0].input == {"city": "Paris"}


def test_a_call_that_is_cut(client: anthropic.Anthropic) -> None:
    reply = both(client, "call", tools=[WEATHER], max_tokens=36)
    assert reply.stop_reason == "max_tokens"
    assert '{"city": "Paris"}'.startswith(reply.content[-1].input["INVALID_JSON"])


def test_the_clients_own_tool_runner(client: anthropic.Anthropic) -> None:
    """It first asks for a conversation that the server keeps, and does without when it hears that there is none."""
    heard: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        heard.append(city)
        return "Rain."

    options: Any = {"max_tokens": 500, "max_iterations": 2, "extra_body": {"seed": SEEDS["call"]}}
    runner = client.beta.messages.tool_runner(model=MODEL, messages=ASK, tools=[get_weather], **options)
    turns = [message.stop_reason for message in runner]
    assert (heard, turns) == (["Paris", "Paris"], ["tool_use", "tool_use"])
