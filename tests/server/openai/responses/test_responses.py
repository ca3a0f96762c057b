"""``/v1/responses`` through the ``openai`` client: items, events, tools there and back, conversations that are kept."""

from __future__ import annotations

from typing import Any

import httpx2 as httpx
import openai
import pytest

from microscale.server.error_texts import RequestError
from microscale.server.openai.responses.input_items import InputMessage
from microscale.server.openai.responses.request import ResponsesRequest
from microscale.server.openai.responses.store import ResponseStore, StoredItem, StoredResponse
from microscale.server.openai.responses.to_chat import messages_of, new_items, stored_input
from microscale.server.openai.responses.toolbox import Toolbox
from microscale.server.options import RequestLimits
from support.live_server import KEY, MODEL, SEEDS, Live
from support.scripted_service import NOT_FINITE, REFUSE

THOUGHT = "Let me think: naïve 👩‍👧."
ANSWER = "The answer is 4. 日本"
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
HEADERS = {"Authorization": f"Bearer {KEY}"}


def create(client: openai.OpenAI, script: str, **options: Any) -> Any:
    asked = {"model": MODEL, "input": "What is 2 + 2?"} | options
    return client.responses.create(**asked, extra_body={"seed": SEEDS[script]})


def test_a_response(client: openai.OpenAI) -> None:
    reply = create(client, "answer", metadata={"a": "b"}, instructions="Be brief.", reasoning={"effort": "low"})
    assert reply.output_text == ANSWER
    thought, message = reply.output
    assert (thought.type, thought.content[0].type, thought.content[0].text) == ("reasoning", "reasoning_text", THOUGHT)
    assert (message.type, message.status, message.role) == ("message", "completed", "assistant")
    assert (reply.status, reply.error, reply.incomplete_details) == ("completed", None, None)
    assert (reply.metadata, reply.instructions, reply.reasoning.effort) == ({"a": "b"}, "Be brief.", "low")
    usage = reply.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens
    assert usage.input_tokens_details.cached_tokens == usage.input_tokens // 2


def test_events_come_in_order_and_build_the_response(client: openai.OpenAI) -> None:
    events = list(create(client, "answer", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    once = [kind for at, kind in enumerate(kinds) if at == 0 or kinds[at - 1] != kind]
    item = ["response.output_item.added", "response.content_part.added"]
    done = ["response.content_part.done", "response.output_item.done"]
    assert once == [
        "response.created",
        "response.in_progress",
        *item,
        *("response.reasoning_text.delta", "response.reasoning_text.done"),
        *done,
        *item,
        *("response.output_text.delta", "response.output_text.done"),
        *done,
        "response.completed",
    ]
    for kind, text in (("reasoning_text", THOUGHT), ("output_text", ANSWER)):
        assert "".join(event.delta for event in events if event.type == f"response.{kind}.delta") == text
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.output_index for event in added] == [0, 1]
    assert all(event.item.content == [] for event in added)
    final = events[-1].response
    assert final.output_text == ANSWER
    assert [item.id for item in final.output] == [event.item.id for event in added]


def test_a_tool_there_and_back(client: openai.OpenAI) -> None:
    events = list(create(client, "call", tools=[WEATHER], stream=True))
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"city": "Paris"}'
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == '{"city": "Paris"}'
    final = events[-1].response
    call = final.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", '{"city": "Paris"}')
    # What was returned can be sent back as it is, or be continued by its id.
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    sent: list[Any] = [{"role": "user", "content": "And in Paris?"}, *final.output, result]
    by_items = create(client, "answer", input=sent, tools=[WEATHER])
    by_id = create(client, "answer", input=[result], tools=[WEATHER], previous_response_id=final.id)
    assert by_items.output_text == by_id.output_text == ANSWER
    assert by_id.previous_response_id == final.id
    lost = result | {"call_id": "call_unknown"}
    with pytest.raises(openai.BadRequestError, match="call_unknown"):
        create(client, "answer", input=[lost], previous_response_id=final.id)


def test_the_clients_own_stream_helper(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="x", extra_body={"seed": SEEDS["answer"]}) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == ANSWER


def test_what_came_before_is_in_the_prompt(client: openai.OpenAI) -> None:
    first = create(client, "answer", instructions="Speak like a pirate.")
    # Without a seed the prompt is said again: what the model hears can be read.
    second = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=900
    )
    heard = "".join(part.text for item in second.output if item.type == "message" for part in item.content)  # type: ignore[union-attr]
    assert ANSWER in heard
    assert "And now?" in heard
    assert "pirate" not in heard, "instructions are each request's own"
    assert second.status == "incomplete"


def test_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    events = list(create(client, "answer", max_output_tokens=6, stream=True))
    assert events[-1].type == "response.incomplete"
    reply = events[-1].response
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.output[-1].status == "incomplete"


def test_malformed_output_is_flagged(client: openai.OpenAI) -> None:
    reply = create(client, "no header")
    assert reply.output_text == "Just text."
    assert reply.model_extra["flaws"] == ["no_header", "no_channel"]


def test_kept_responses_can_be_fetched_and_deleted(client: openai.OpenAI) -> None:
    reply = create(client, "answer")
    assert client.responses.retrieve(reply.id).output_text == ANSWER
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        client.responses.retrieve(reply.id, extra_query={"starting_after": 3})
    client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError) as gone:
        client.responses.retrieve(reply.id)
    assert gone.value.code == "response_not_found"
    with pytest.raises(openai.NotFoundError) as gone:
        create(client, "answer", previous_response_id=reply.id)
    assert (gone.value.code, gone.value.param) == ("previous_response_not_found", "previous_response_id")
    unkept = create(client, "answer", store=False)
    assert unkept.model_extra["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_failure_on_the_way_and_before(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="not finite"):
        client.responses.create(model=MODEL, input="x", extra_body={"seed": NOT_FINITE})
    with pytest.raises(openai.RateLimitError):
        client.responses.create(model=MODEL, input="x", stream=True, extra_body={"seed": REFUSE})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
    ({"input": [{"role": "alien", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": "x"}] * 2049}, "input"),
    ({"tools": [WEATHER | {"parameters": {"not": {}}, "strict": True}]}, "tools[0].parameters"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}, "strict": True}}}, "text.format"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
    ({"text": {"verbosity": "loud"}}, "text.verbosity"),
    ({"truncation": "sometimes"}, "truncation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
]


@pytest.mark.parametrize(("fields", "where"), WRONG, ids=[where for _, where in WRONG])
def test_what_is_not_supported_is_refused_by_name(server: Live, fields: dict[str, Any], where: str) -> None:
    reply = httpx.post(f"{server.v1}/responses", json={"input": "x"} | fields, headers=HEADERS, timeout=30)
    assert reply.status_code == 400, reply.text
    assert str(reply.json()["error"]["param"]).startswith(where), reply.text


def test_what_agents_send_is_taken(server: Live) -> None:
    body = {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}],
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "high", "summary": "auto"},
        "parallel_tool_calls": True,
        "prompt_cache_key": "k",
        "tool_choice": "auto",
        "text": {"verbosity": "medium", "format": {"type": "text"}},
        "truncation": "disabled",
        "service_tier": "auto",
        "store": False,
        "seed": SEEDS["answer"],
    }
    reply = httpx.post(f"{server.v1}/responses", json=body, headers=HEADERS, timeout=30)
    assert reply.status_code == 200, reply.text


def test_items_fold_into_messages() -> None:
    said = [
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "one"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "r1"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "three"}]},
        {"role": "assistant", "content": "four"},
        {"role": "assistant", "content": "five"},
    ]
    items = new_items(ResponsesRequest.model_validate({"input": said}), (), ResponseStore(), "")
    made: list[Any] = messages_of(items, Toolbox([]))
    assert [message.role for message in made] == ["assistant", "tool", "assistant", "assistant"]
    assert (made[0].reasoning, made[0].content, [call.id for call in made[0].tool_calls]) == (
        "one",
        "two",
        ["c1", "c2"],
    )
    assert (made[2].reasoning, made[2].content, made[3].content) == ("three", "four", "five")


def _kept(size: int) -> StoredResponse:
    item = StoredItem("msg", InputMessage(role="user", content=""), size, is_ours=False)
    return StoredResponse(b"", (item,), 1, "")


def test_the_store_is_bounded_by_number_and_bytes() -> None:
    store, limits = ResponseStore(), RequestLimits(max_stored_responses=3, max_stored_bytes=100)
    for n in range(5):
        store.put(f"r{n}", _kept(10), limits)
    assert len(store) == 3
    store.get("r2", "")
    store.put("big", _kept(85), limits)
    assert len(store) == 2
    assert store.get("r2", "").size == 10
    with pytest.raises(RequestError, match=r"The response .* is not stored"):
        store.get("r4", "")
    store.put("too big", _kept(101), limits)
    assert len(store) == 0


def test_items_are_found_while_a_response_that_holds_them_is_kept() -> None:
    store, limits = ResponseStore(), RequestLimits(max_stored_responses=2)
    ours = stored_input(InputMessage(role="user", content="x"))
    theirs = stored_input(InputMessage(role="user", content="x", id="msg_1"))
    store.put("first", StoredResponse(b"", (ours, theirs), 2, "me"), limits)
    store.put("second", StoredResponse(b"", (ours,), 1, "me"), limits)
    assert store.item(ours.id, "me") is ours
    for item_id, owner in ((ours.id, "you"), ("msg_1", "me"), ("none", "me")):
        with pytest.raises(RequestError, match=r"The item .* is not stored"):
            store.item(item_id, owner)
    store.delete("first", "me")
    assert store.item(ours.id, "me") is ours
    store.delete("second", "me")
    with pytest.raises(RequestError, match=r"The item .* is not stored"):
        store.item(ours.id, "me")
