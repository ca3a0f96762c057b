"""Conversations through ``/v1/responses`` as clients continue them: by reference, handed back whole, cut to fit."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import openai
import pytest
from pydantic import BaseModel

from microscale.server.openai.responses.input_items import sealed, unsealed
from support.live_server import CONTEXT, KEY, MODEL, OTHER_KEY, SEEDS, Live

HEADERS = {"Authorization": f"Bearer {KEY}"}
OTHER = {"Authorization": f"Bearer {OTHER_KEY}"}
ANSWER = "The answer is 4. 日本"
SUM = '{"total": 4}'
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


def post(server: Live, body: Any, headers: Any = HEADERS, path: str = "") -> httpx.Response:
    return httpx.post(f"{server.v1}/responses{path}", json=body, headers=headers, timeout=60)


def length_of(server: Live, body: Any) -> int:
    counted = post(server, body, path="/input_tokens")
    assert counted.status_code == 200, counted.text
    return counted.json()["input_tokens"]  # type: ignore[no-any-return]


def heard_by(server: Live, body: Any) -> str:
    """The prompt: without a seed it is said again, here beyond the ends of its turns."""
    more = {"max_output_tokens": length_of(server, body), "ignore_eos": True, "tool_choice": "none", "store": False}
    reply = post(server, body | more)
    assert reply.status_code == 200, reply.text
    return "".join(part["text"] for item in reply.json()["output"] for part in item.get("content", []))


# ---- the AI SDK ------------------------------------------------------------------------------------------------------


def first_step(server: Live, **more: Any) -> Any:
    body = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "And in Paris?"}]}]}
    reply = post(server, body | {"tools": [WEATHER], "tool_choice": "auto", "seed": SEEDS["call"]} | more)
    assert reply.status_code == 200, reply.text
    return reply.json()


def second_step(thought: Any, call: Any) -> Any:
    """As Vercel's AI SDK (ai 6.0.326) sends it: the call without its id, and a result."""
    past = {key: call[key] for key in ("type", "call_id", "name", "arguments")}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"sky":"clear"}'}
    asked = {"role": "user", "content": [{"type": "input_text", "text": "And in Paris?"}]}
    return {"input": [asked, thought, past, result], "tools": [WEATHER], "tool_choice": "auto"}


def test_the_ai_sdks_second_step_refers_to_the_first(server: Live) -> None:
    thought, call = first_step(server)["output"]
    body = second_step({"type": "item_reference", "id": thought["id"]}, call)
    reply = post(server, body | {"seed": SEEDS["answer"]})
    assert reply.json()["output"][-1]["content"][0]["text"] == ANSWER, reply.text
    assert "x-microscale-ignored" not in reply.headers
    heard = heard_by(server, body)
    assert "I need the weather." in heard
    assert '{"sky":"clear"}' in heard
    # An id alone is a reference too, and so is that of a call.
    by_ids = second_step({"id": thought["id"]}, call)
    by_ids["input"][2] = {"type": "item_reference", "id": call["id"]}
    assert length_of(server, by_ids) == length_of(server, body)


def test_the_ai_sdks_second_step_without_a_store(server: Live) -> None:
    include = ["reasoning.encrypted_content"]
    thought, call = first_step(server, store=False, include=include)["output"]
    sent = {"type": "reasoning", "id": thought["id"], "summary": []}
    sent["encrypted_content"] = thought["encrypted_content"]
    body = second_step(sent, call) | {"store": False, "include": include}
    reply = post(server, body | {"seed": SEEDS["answer"]})
    assert reply.json()["output"][-1]["content"][0]["text"] == ANSWER, reply.text
    assert "I need the weather." in heard_by(server, body)
    gone = post(server, second_step({"type": "item_reference", "id": thought["id"]}, call))
    assert gone.status_code == 404
    assert gone.json()["error"]["code"] == "item_not_found"
    foreign = post(server, second_step(sent | {"encrypted_content": "gAAAA"}, call) | {"seed": SEEDS["answer"]})
    assert foreign.headers["x-microscale-ignored"] == "input.encrypted_content"


def test_thoughts_are_sealed_and_read_again() -> None:
    for text in ("", "naïve 👩‍👧"):
        assert unsealed(sealed(text)) == text
    for foreign in ("", "gAAAA", "microscale:x", "microscale:/w=="):
        assert unsealed(foreign) is None


def test_references_are_their_owners_and_last_as_long_as_the_response(server: Live) -> None:
    first = first_step(server)
    thought, call = first["output"]
    body = second_step({"type": "item_reference", "id": thought["id"]}, call) | {"seed": SEEDS["answer"]}
    assert post(server, body, OTHER).status_code == 404
    second = post(server, body).json()
    httpx.delete(f"{server.v1}/responses/{first['id']}", headers=HEADERS)
    assert post(server, body | {"store": False}).status_code == 200, "the second response holds it, too"
    httpx.delete(f"{server.v1}/responses/{second['id']}", headers=HEADERS)
    assert post(server, body).status_code == 404


def test_a_reference_to_what_previous_response_id_brings_is_in_its_place(server: Live) -> None:
    first = first_step(server)
    thought, call = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
    body: Any = {"input": [result], "previous_response_id": first["id"]}
    named = body | {"input": [{"type": "item_reference", "id": thought["id"]}, result]}
    assert length_of(server, named) == length_of(server, body)
    assert heard_by(server, named).count("I need the weather.") == 1


# ---- handed back whole -----------------------------------------------------------------------------------------------


class Total(BaseModel):
    total: int


def test_parsed_output_is_handed_back_whole(server: Live, client: openai.OpenAI) -> None:
    parsed = client.responses.parse(
        model=MODEL, input="x", text_format=Total, extra_body={"seed": SEEDS["sum"]}, max_output_tokens=50
    )
    assert parsed.output_parsed == Total(total=4)
    called = client.responses.create(model=MODEL, input="x", tools=[WEATHER], extra_body={"seed": SEEDS["call"]})
    call = called.output[-1].model_dump() | {"parsed_arguments": {"city": "Paris"}, "namespace": None}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain.", "status": None}
    dumped = [item.model_dump() for item in parsed.output]
    assert dumped[-1]["content"][0]["parsed"] == {"total": 4}
    sent: list[Any] = [*dumped, {"role": "user", "content": "y"}, called.output[0].model_dump(), call, result]
    reply = client.responses.create(model=MODEL, input=sent, tools=[WEATHER], extra_body={"seed": SEEDS["answer"]})
    assert reply.output_text == ANSWER
    heard = heard_by(server, {"input": sent, "tools": [WEATHER]})
    for text in (SUM, "I need the weather.", "Rain."):
        assert text in heard


def test_items_of_hosted_tools_are_passed_over_and_named(server: Live) -> None:
    hosted: list[dict[str, Any]] = [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "image_generation_call", "id": "ig_1", "result": None, "status": "completed"},
        {"type": "something_new", "key": 1},
    ]
    reply = post(server, {"input": [*hosted, {"role": "user", "content": "x"}], "seed": SEEDS["answer"]})
    assert reply.status_code == 200
    named = [f"input.{item['type']}" for item in hosted]
    assert reply.headers["x-microscale-ignored"].split(", ") == named
    alone = post(server, {"input": hosted})
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("kind", ["input_image", "input_file", "input_audio"])
def test_parts_that_are_no_text_are_refused(server: Live, kind: str) -> None:
    part = {"type": kind, "image_url": "data:,", "file_id": "f", "input_audio": {}}
    for item in (
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, part]},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
    ):
        error = post(server, {"input": [item]}).json()["error"]
        assert "this model reads only text" in error["message"]
        assert error["code"] == "unsupported_value"
    refusal = {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]}
    assert "I will not." in heard_by(server, {"input": [refusal, {"role": "user", "content": "x"}]})


# ---- a context that is too short -------------------------------------------------------------------------------------


def test_truncation_drops_the_oldest_that_are_no_instructions(server: Live) -> None:
    past: list[Any] = [{"role": "developer", "content": "Be kind."}]
    for number in range(30):
        call = {"call_id": f"c{number}", "name": "get_weather", "arguments": "{}"}
        past.append({"role": "user", "content": f"question {number} " + "x " * 100})
        past.append({"type": "function_call", **call})
        past.append({"type": "function_call_output", "call_id": f"c{number}", "output": f"result {number}"})
    past.append({"role": "user", "content": "And the last?"})
    body = {"input": past, "tools": [WEATHER], "instructions": "Be brief."}
    refused = post(server, body)
    assert refused.status_code == 400
    assert (refused.json()["error"]["code"], refused.json()["error"]["param"]) == ("context_length_exceeded", "input")
    count = length_of(server, body | {"truncation": "auto"})
    assert CONTEXT // 2 < count <= CONTEXT - CONTEXT // 8
    reply = post(server, body | {"truncation": "auto", "seed": SEEDS["answer"]})
    assert reply.json()["truncation"] == "auto"
    assert reply.json()["output"][-1]["content"][0]["text"] == ANSWER
    # As many of the oldest are gone as must be, and a result goes with its call.
    for num_dropped in range(1, len(past)):
        kept = past[1 + num_dropped :]
        called = {item["call_id"] for item in kept if item.get("type") == "function_call"}
        kept = [item for item in kept if item.get("type") != "function_call_output" or item["call_id"] in called]
        by_hand = length_of(server, body | {"input": [past[0], *kept]})
        if by_hand <= CONTEXT - CONTEXT // 8:
            break
    assert count == by_hand
    too_long = {"input": "word " * 8000, "truncation": "auto"}
    error = post(server, too_long).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_a_result_at_the_end_keeps_its_call(server: Live) -> None:
    past: list[Any] = [{"role": "user", "content": f"question {number} " + "x " * 240} for number in range(30)]
    past.append({"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"})
    past.append({"type": "function_call_output", "call_id": "c", "output": "Rain."})
    body = {"input": past, "tools": [WEATHER], "truncation": "auto", "seed": SEEDS["answer"]}
    reply = post(server, body)
    assert reply.status_code == 200, reply.text


# ---- what was kept ---------------------------------------------------------------------------------------------------


def test_input_items_are_listed(server: Live, client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="one", extra_body={"seed": SEEDS["answer"]})
    sent: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}]
    second = client.responses.create(
        model=MODEL, input=sent, previous_response_id=first.id, extra_body={"seed": SEEDS["answer"]}
    )
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in listed] == ["message", "reasoning", "message", "message"]
    texts = [item.content[0].text for item in listed if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["one", ANSWER, "two"]
    assert [item.id for item in listed[1:3]] == [item.id for item in first.output]
    newest = client.responses.input_items.list(second.id, limit=1)
    assert (newest.data[0].id, newest.has_more) == (listed[-1].id, True)
    assert [item.id for item in newest] == [item.id for item in reversed(listed)], "the client turns the pages"
    rest = client.responses.input_items.list(second.id, after=listed[1].id or "", order="asc")
    assert [item.id for item in rest.data] == [item.id for item in listed[2:]]
    path = f"{server.v1}/responses/{second.id}/input_items"
    for query, status in (("limit=0", 400), ("limit=x", 400), ("order=up", 400), ("after=none", 404)):
        assert httpx.get(f"{path}?{query}", headers=HEADERS).status_code == status
    assert httpx.get(path, headers=OTHER).status_code == 404


def test_input_tokens_are_those_of_the_prompt(client: openai.OpenAI) -> None:
    asked: Any = {"input": "What is 2 + 2?", "instructions": "Be brief.", "tools": [WEATHER]}
    count = client.responses.input_tokens.count(**asked)
    reply = client.responses.create(model=MODEL, **asked, extra_body={"seed": SEEDS["answer"]})
    assert (count.object, count.input_tokens) == ("response.input_tokens", reply.usage.input_tokens)


def test_what_cannot_be_done_with_a_kept_response(server: Live, client: openai.OpenAI) -> None:
    kept = client.responses.create(model=MODEL, input="x", extra_body={"seed": SEEDS["answer"]})
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(kept.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.retrieve(kept.id, stream=True)
    assert refused.value.param == "stream"
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")
    path = f"{server.v1}/responses/{kept.id}"
    found = httpx.get(f"{path}?include[]=reasoning.encrypted_content&stream=false&new%0Akey=1", headers=HEADERS)
    assert (found.status_code, found.headers["x-microscale-ignored"]) == (200, "include, ?")
    for missing in ("/none", "/none/input_items"):
        assert httpx.get(f"{server.v1}/responses{missing}", headers=HEADERS).status_code == 404


# ---- fields ----------------------------------------------------------------------------------------------------------


def test_a_reply_says_what_was_asked(client: openai.OpenAI) -> None:
    asked: Any = {
        "reasoning": {"effort": "xhigh", "summary": "detailed"},
        "text": {"verbosity": "high"},
        "truncation": "auto",
        "max_tool_calls": 3,
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "user": "me",
        "prompt_cache_key": "k",
    }
    reply = client.responses.create(model=MODEL, input="x", **asked, extra_body={"seed": SEEDS["answer"]})
    assert (reply.reasoning.effort, reply.reasoning.summary) == ("xhigh", "detailed")
    assert reply.text.verbosity == "high"
    assert (reply.truncation, reply.max_tool_calls, reply.parallel_tool_calls) == ("auto", 3, True)
    assert (reply.service_tier, reply.user, reply.prompt_cache_key) == ("default", "me", "k")
    assert reply.completed_at is not None


@pytest.mark.parametrize(
    ("effort", "heard"),
    [("none", "low"), ("minimal", "low"), ("low", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")],
)
def test_efforts_are_those_that_harmony_has(server: Live, effort: str, heard: str) -> None:
    assert f"Reasoning: {heard}" in heard_by(server, {"input": "x", "reasoning": {"effort": effort}})


def test_verbosity_is_told_in_words(server: Live) -> None:
    heard = {level: heard_by(server, {"input": "x", "text": {"verbosity": level}}) for level in ("low", "medium")}
    assert "Keep the final answer short." in heard["low"]
    assert "final answer" not in heard["medium"]


def test_includes_that_are_not_known_are_named(server: Live) -> None:
    include = ["file_search_call.results", "reasoning.encrypted_content"]
    body = {"input": "x", "include": include, "seed": SEEDS["answer"]}
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    reply = post(server, body | options)
    assert (
        reply.headers["x-microscale-ignored"] == "include.file_search_call.results, stream_options.include_obfuscation"
    )
    (thought,) = (
        event["item"]
        for line in reply.text.splitlines()
        if line.startswith("data: ") and (event := json.loads(line[6:]))["type"] == "response.output_item.done"
        if event["item"]["type"] == "reasoning"
    )
    assert unsealed(thought["encrypted_content"]) == thought["content"][0]["text"]


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked |= {"model": MODEL, "input": "x", "extra_body": {"seed": SEEDS["answer"]}}
    part: Any = client.responses.create(**asked).output[-1].content[0]
    assert b"".join(bytes(entry.bytes) for entry in part.logprobs).decode() == ANSWER
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)
    events = list(client.responses.create(**asked, stream=True))
    deltas = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in deltas] == [entry.token for entry in part.logprobs]
    (done,) = (event for event in events if event.type == "response.output_text.done")
    assert len(done.logprobs) == len(deltas)
