"""ChatML through the server, over a scripted engine: thoughts, calls and forms in every API that it speaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from support.live_server import KEY, MODEL, SEEDS, Live, live
from support.tiny_chatml_text import ALWAYS_THINKS, tiny_chatml, write_chatml_text

HEADERS = {"authorization": f"Bearer {KEY}"}
NEVER = "\x00"
"""A stop string that no text has: with one to look for, no token goes the fast path."""
THINK = "<think>\nOne, two.\n\nThree.\n</think>\n\n"
CITY = '{"city": "Paris \\"{\\" 日本"}'
CALL_F = f'<tool_call>\n{{"name": "f", "arguments": {CITY}}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
TURNS = {
    "answer": f"{THINK}The answer is 4.\n\nTruly, 日本.<|im_end|>",
    "calls": f"{THINK}I look.\n{CALL_F}\n{CALL_G}<|im_end|>",
    "text": "Just text.<|im_end|>",
    "begun": "One, two.\n\nThree.\n</think>\n\nThe answer is 4.<|im_end|>",
    "malformed": "<tool_call>\n{'name': 'f'}\n</tool_call><|im_end|>",
}
SEED = {name: len(SEEDS) + at for at, name in enumerate(TURNS)}
THOUGHT = "One, two.\n\nThree."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
]
ASK: list[Any] = [{"role": "user", "content": "What is <tool_call> 2 + 2?</think>"}]
ASKED = "<|im_start|>user\nWhat is <tool_call> 2 + 2?</think><|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("server")
    text = write_chatml_text(folder / "text")
    with live(folder / "log", tokenizer=str(text), turns=list(TURNS.values())) as running:
        yield running
        assert "Traceback" not in (folder / "log").read_text()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model of 30 ms a token: what comes as it is written comes in many parts, however busy the machine is."""
    folder = tmp_path_factory.mktemp("slow")
    text = write_chatml_text(folder / "text")
    with live(folder / "log", step_s=0.03, tokenizer=str(text), turns=list(TURNS.values())) as running:
        yield running


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A model whose template begins the thoughts."""
    folder = tmp_path_factory.mktemp("thinker")
    text = write_chatml_text(folder / "text", ALWAYS_THINKS)
    with live(folder / "log", tokenizer=str(text), turns=list(TURNS.values())) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)


def post(server: Live, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{server.address}{path}", json=body, headers=HEADERS, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(server: Live, turn: str, **options: Any) -> Any:
    return post(server, "/v1/chat/completions", model=MODEL, messages=ASK, seed=SEED[turn], **options)


def streamed(server: Live, turn: str, **options: Any) -> list[Any]:
    body = {"model": MODEL, "messages": ASK, "seed": SEED[turn], "stream": True, **options}
    with httpx.stream("POST", f"{server.v1}/chat/completions", json=body, headers=HEADERS, timeout=60) as reply:
        assert reply.status_code == 200
        data = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(each)["choices"][0] for each in data]


def joined(choices: list[Any], field: str) -> str:
    return "".join(choice["delta"].get(field) or "" for choice in choices)


# ---- chat completions ------------------------------------------------------------------------------------------------


def test_thoughts_are_reasoning(server: Live) -> None:
    [choice] = chat(server, "answer")["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == THOUGHT
    assert message["content"] == "The answer is 4.\n\nTruly, 日本."
    assert choice["finish_reason"] == "stop"
    hidden = chat(server, "answer", include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in hidden
    assert hidden["content"] == message["content"]


@pytest.mark.parametrize("more", [{}, {"stop": [NEVER]}, {"tools": TOOLS[1:]}], ids=["fast path", "usual", "tools"])
def test_a_stream_of_an_answer(slow: Live, more: dict[str, Any]) -> None:
    choices = streamed(slow, "answer", **more)
    assert joined(choices, "reasoning_content") == joined(choices, "reasoning") == THOUGHT
    assert joined(choices, "content") == "The answer is 4.\n\nTruly, 日本."
    assert choices[-1]["finish_reason"] == "stop"
    # Text comes as it is written, not at the end.
    assert sum(bool(choice["delta"].get("content")) for choice in choices) > 5


def test_calls(server: Live) -> None:
    [choice] = chat(server, "calls", tools=[*TOOLS[1:], function("f")])["choices"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert calls == [("f", CITY), ("g", "{}")]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("I look.", THOUGHT)
    assert choice["finish_reason"] == "tool_calls"
    # Without the tool, what the model wrote is text.
    [choice] = chat(server, "calls", tools=TOOLS[1:])["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["g"]
    assert CITY in choice["message"]["content"]


def function(name: str) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_a_stream_of_calls(slow: Live, choice: Any) -> None:
    """Under a grammar too: strict, required and named calls have schemas that bind their arguments."""
    choices = streamed(slow, "calls", tools=TOOLS, tool_choice=choice)
    deltas = [call for each in choices for call in each["delta"].get("tool_calls") or []]
    begun = {call["index"]: call["function"]["name"] for call in deltas if call["function"].get("name")}
    arguments = ["".join(c["function"].get("arguments") or "" for c in deltas if c["index"] == at) for at in begun]
    assert (list(begun.values()), arguments) == (["f", "g"], [CITY, "{}"])
    # Arguments come while the model writes them.
    assert sum(call["index"] == 0 for call in deltas) > 3
    assert joined(choices, "reasoning_content") == THOUGHT
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_one_call_where_one_is_asked_for(server: Live, choice: str) -> None:
    whole = chat(server, "calls", tools=TOOLS, tool_choice=choice)
    one = chat(server, "calls", tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
    calls = one["choices"][0]["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["f"]
    # The engine itself ends there, so that nothing is computed in vain.
    left = len(tiny_chatml().encode_with_control("\n" + CALL_G + "<|im_end|>"))
    assert one["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] - left


def test_a_malformed_call_is_content(server: Live) -> None:
    reply = chat(server, "malformed", tools=TOOLS)
    assert reply["choices"][0]["message"]["content"] == "{'name': 'f'}"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert "call_without_recipient" in json.dumps(reply)


@pytest.mark.parametrize(
    ("options", "begun"),
    [
        ({}, ""),
        ({"reasoning_effort": "high"}, ""),
        ({"reasoning_effort": "none"}, "<think>\n\n</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<think>\n\n</think>\n\n"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, ""),
    ],
)
def test_thinking_is_a_choice(server: Live, options: dict[str, Any], begun: str) -> None:
    reply = chat(server, "text", return_token_ids=True, **options)
    ids = reply["prompt_token_ids"]
    assert tiny_chatml().decode(ids, show_control=True) == ASKED + begun
    # What the user wrote is text, even where it spells a mark.
    assert sum(map(tiny_chatml().is_control, ids)) == 3 + begun.count("<")
    assert reply["choices"][0]["message"]["content"] == "Just text."


def test_results_go_back_to_the_model(server: Live) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    talk = [*ASK, {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [called]}]
    talk.append({"role": "tool", "tool_call_id": "c1", "content": "18 </tool_response>"})
    ids = post(server, "/tokenize", messages=talk, tools=TOOLS)["tokens"]
    text = tiny_chatml().decode(ids, show_control=True)
    assert '"name": "f"' in text.partition("<tools>")[2].partition("</tools>")[0]
    assert text.endswith(
        '<|im_start|>assistant\n<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n18 </tool_response>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_forms_are_compiled_and_wrong_ones_refused(client: openai.OpenAI, server: Live, thinker: Live) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    for live_server in (server, thinker):
        for options in ({}, {"tools": TOOLS}, {"chat_template_kwargs": {"enable_thinking": False}}):
            assert chat(live_server, "text", response_format=form, **options)["choices"]
    impossible = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": impossible}}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.function\.parameters"):
        client.chat.completions.create(model=MODEL, messages=ASK, tools=tools)


# ---- a prompt that begins the thoughts -------------------------------------------------------------------------------


def test_thoughts_that_the_prompt_begins(thinker: Live) -> None:
    reply = chat(thinker, "begun", return_token_ids=True)
    assert tiny_chatml().decode(reply["prompt_token_ids"], show_control=True) == ASKED + "<think>\n"
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "The answer is 4.")
    choices = streamed(thinker, "begun")
    assert (joined(choices, "reasoning_content"), joined(choices, "content")) == (THOUGHT, "The answer is 4.")


def test_an_answer_that_is_continued(server: Live, thinker: Live) -> None:
    begun = [*ASK, {"role": "assistant", "content": "So:\n"}]
    for live_server, thought in ((server, ""), (thinker, "<think>\n\n</think>\n\n")):
        reply = post(
            live_server,
            "/v1/chat/completions",
            messages=begun,
            seed=SEED["text"],
            continue_final_message=True,
            add_generation_prompt=False,
            return_token_ids=True,
        )
        text = tiny_chatml().decode(reply["prompt_token_ids"], show_control=True)
        assert text == f"{ASKED}{thought}So:\n"
        assert reply["choices"][0]["message"]["content"] == "Just text."


# ---- the other APIs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_responses(client: openai.OpenAI, stream: bool) -> None:
    def output(turn: str, **options: Any) -> list[Any]:
        asked = {"model": MODEL, "input": "2 + 2?", "extra_body": {"seed": SEED[turn]}, **options}
        if not stream:
            return list(client.responses.create(**asked).output)
        events = list(client.responses.create(stream=True, **asked))
        assert events[-1].type == "response.completed"
        return list(events[-1].response.output)

    thought, answer = output("answer")
    assert thought.content[0].text == THOUGHT
    assert answer.content[0].text == "The answer is 4.\n\nTruly, 日本."
    tools: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    thought, text, *calls = output("calls", tools=tools, tool_choice="required")
    assert (thought.type, text.content[0].text) == ("reasoning", "I look.")
    assert [(call.name, call.arguments) for call in calls] == [("f", CITY), ("g", "{}")]
    assert [item.type for item in output("calls", tools=tools, parallel_tool_calls=False)].count("function_call") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_messages(server: Live, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=server.address, api_key=KEY, max_retries=0)

    def blocks(turn: str, **options: Any) -> tuple[list[Any], str | None]:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": ASK, "extra_body": {"seed": SEED[turn]}}
        if not stream:
            reply = client.messages.create(**asked, **options)
        else:
            with client.messages.stream(**asked, **options) as events:
                reply = events.get_final_message()
        return list(reply.content), reply.stop_reason

    (thought, answer), reason = blocks("answer", thinking={"type": "enabled", "budget_tokens": 8000})
    assert (thought.thinking, answer.text, reason) == (THOUGHT, "The answer is 4.\n\nTruly, 日本.", "end_turn")
    tools: Any = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS]
    (text, *calls), reason = blocks("calls", tools=tools, tool_choice={"type": "any"})
    assert (text.text, reason) == ("I look.", "tool_use")
    assert [(call.name, call.input) for call in calls] == [("f", json.loads(CITY)), ("g", {})]


def test_raw_text_shows_marks_that_are_not_special(server: Live) -> None:
    """As the tokenizer's file says: programs cut thoughts off at the ``</think>`` of a completion."""
    body = {"prompt": "Hi", "max_tokens": 400, "logprobs": 0, "seed": SEED["calls"]}
    stops = [tiny_chatml().control["<|im_end|>"]]
    [choice] = post(server, "/v1/completions", **body, stop_token_ids=stops)["choices"]
    assert choice["text"] == TURNS["calls"].removesuffix("<|im_end|>")
    told = choice["logprobs"]
    places = list(zip(told["text_offset"], told["tokens"], strict=True))[:-1]
    assert all(choice["text"].startswith(token, at) for at, token in places if not token.startswith("bytes:"))


def test_log_probabilities_are_those_of_shown_tokens(server: Live) -> None:
    told = chat(server, "answer", logprobs=True)["choices"][0]["logprobs"]
    content = b"".join(bytes(entry["bytes"]) for entry in told["content"]).decode()
    assert content == "The answer is 4.\n\nTruly, 日本."
    assert b"".join(bytes(entry["bytes"]) for entry in told["reasoning"]).decode().rstrip("\n") == THOUGHT


def test_completions_put_nothing_before_a_prompt(server: Live) -> None:
    body = {"prompt": "<|im_start|>user\nHi", "max_tokens": 3, "return_token_ids": True, "seed": SEED["text"]}
    [choice] = post(server, "/v1/completions", **body)["choices"]
    assert choice["prompt_token_ids"] == tiny_chatml().encode_with_control("<|im_start|>user\nHi")
    raw = chat(server, "calls", tools=TOOLS, skip_special_tokens=False)["choices"][0]["message"]["content"]
    assert raw == TURNS["calls"]
