"""Chat formats through every API, over a scripted engine: Gemma's and ChatML's reasoning, calls and raw prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx2 as httpx
import openai
import pytest

from support.chat_formats import xml
from support.live_server import KEY, MODEL, SEEDS, Live, live
from support.tiny_chatml_text import ALWAYS_THINKS, XML_CALLS, tiny_chatml, write_chatml_text
from support.tiny_gemma_text import tiny_gemma, write_gemma_text

HEADERS = {"authorization": f"Bearer {KEY}"}
NEVER = "\x00"
"""A stop string that no text contains: with one to look for, no token takes the fast path."""
SLOW: dict[str, Any] = {"priority": 30}
"""30 ms per token: streamed text arrives in many parts, however busy the machine is."""
THOUGHT = "One, two.\n\nThree."
ANSWER = "The answer is 4.\n\nTruly, 日本."
CITY = '{"city": "Paris \\"{\\" 日本"}'
THINK = f"<think>\n{THOUGHT}\n</think>\n\n"
CALL_F = f'<tool_call>\n{{"name": "f", "arguments": {CITY}}}\n</tool_call>'
CALL_G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
CHATML = {
    "answer": f"{THINK}{ANSWER}<|im_end|>",
    "calls": f"{THINK}I look.\n{CALL_F}\n{CALL_G}<|im_end|>",
    "text": "Just text.<|im_end|>",
    "begun": f"{THOUGHT}\n</think>\n\nThe answer is 4.<|im_end|>",
    "malformed": "<tool_call>\n{'name': 'f'}\n</tool_call><|im_end|>",
}
XML_F, XML_G = xml("f", ("city", 'Paris "{" 日本'), ("days", "3")), xml("g")
XML = {
    "answer": f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>",
    "calls": f"{THOUGHT}\n</think>\n\nI look.\n\n{XML_F}\n{XML_G}<|im_end|>",
    "in thoughts": f"{THOUGHT}\n{XML_F}<|im_end|>",
    "text": "</think>\n\nJust text.<|im_end|>",
}
GEMMA_THOUGHT = "<|channel>thought\nTwo of them.\n<channel|>"
GEMMA = {
    "calls": GEMMA_THOUGHT + "<|tool_call>call:f{a:1}<tool_call|><|tool_call>call:g{b:2}<tool_call|><|tool_response>",
    "not closed": "<|tool_call>call:f{a:1}<|tool_call>call:g{b:2}<tool_call|><|tool_response>",
    "text": "No call.<turn|>",
}
SEED = {
    "chatml": {name: len(SEEDS) + at for at, name in enumerate(CHATML)},
    "chatml_xml": {name: len(SEEDS) + at for at, name in enumerate(XML)},
    "gemma": {name: len(SEEDS) + at for at, name in enumerate(GEMMA)},
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FREE = {"type": "object", "properties": {}}
STRICT: list[Any] = [
    {"type": "function", "function": {"name": "f", "strict": True, "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g", "parameters": FREE}},
]
TOOLS: list[Any] = [{"type": "function", "function": {"name": name, "parameters": FREE}} for name in ("f", "g")]
ASK: list[Any] = [{"role": "user", "content": "What is <tool_call> 2 + 2?</think>"}]
ASKED = "<|im_start|>user\nWhat is <tool_call> 2 + 2?</think><|im_end|>\n<|im_start|>assistant\n"


class Servers(dict[str, Live]):
    """Started when first used. ``thinker``: a ChatML model whose template begins the reasoning."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def __missing__(self, name: str) -> Live:
        if name == "gemma":
            text, turns = write_gemma_text(self._folder / name), list(GEMMA.values())
        elif name == "chatml_xml":
            text, turns = write_chatml_text(self._folder / name, XML_CALLS), list(XML.values())
        else:
            template = (ALWAYS_THINKS,) if name == "thinker" else ()
            text, turns = write_chatml_text(self._folder / name, *template), list(CHATML.values())
        running = live(self._folder / f"{name}.log", tokenizer=str(text), turns=turns)
        self[name] = self._stack.enter_context(running)
        return self[name]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Live]]:
    folder = tmp_path_factory.mktemp("formats")
    with ExitStack() as stack:
        yield Servers(folder, stack)
        assert not any("Traceback" in log.read_text() for log in folder.glob("*.log"))


@pytest.fixture(params=["gemma", "chatml", "chatml_xml"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(servers: dict[str, Live]) -> Live:
    return servers["chatml"]


def openai_client(server: Live) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=KEY, max_retries=0)


def post(server: Live, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{server.address}{path}", json=body, headers=HEADERS, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(server: Live, turn: str, name: str = "chatml", **options: Any) -> Any:
    return post(server, "/v1/chat/completions", model=MODEL, messages=ASK, seed=SEED[name][turn], **options)


def streamed(server: Live, turn: str, name: str = "chatml", **options: Any) -> list[Any]:
    body = {"model": MODEL, "messages": ASK, "seed": SEED[name][turn], "stream": True, **options}
    with httpx.stream("POST", f"{server.v1}/chat/completions", json=body, headers=HEADERS, timeout=60) as reply:
        assert reply.status_code == 200
        data = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert data.pop() == "[DONE]"
    return [json.loads(line)["choices"][0] for line in data]


def joined(choices: list[Any], field: str) -> str:
    return "".join(choice["delta"].get(field) or "" for choice in choices)


# ---- one call or several, in every API -------------------------------------------------------------------------------


def called(choice: Any) -> list[str]:
    return [call["function"]["name"] for call in choice["message"].get("tool_calls") or []]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_chat_returns_one_call_on_request(servers: dict[str, Live], name: str, choice: str) -> None:
    whole = chat(servers[name], "calls", name, tools=TOOLS if name == "gemma" else STRICT, tool_choice=choice)
    one = chat(
        servers[name], "calls", name, tools=TOOLS if name == "gemma" else STRICT, tool_choice=choice,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert called(whole["choices"][0]) == ["f", "g"]
    assert called(one["choices"][0]) == ["f"]
    assert whole["choices"][0]["finish_reason"] == one["choices"][0]["finish_reason"] == "tool_calls"
    # The engine itself ends there, so that nothing is computed in vain.
    rest = {
        "gemma": "<|tool_call>call:g{b:2}<tool_call|><|tool_response>",
        "chatml": f"\n{CALL_G}<|im_end|>",
        "chatml_xml": f"\n{XML_G}<|im_end|>",
    }[name]
    left = len((tiny_gemma() if name == "gemma" else tiny_chatml()).encode_with_control(rest))
    assert one["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] - left
    deltas = streamed(servers[name], "calls", name, tools=TOOLS, parallel_tool_calls=False)
    names = [call["function"].get("name") for each in deltas for call in each["delta"].get("tool_calls") or []]
    assert [found for found in names if found] == ["f"]


@pytest.mark.parametrize("options", [{"tool_choice": "required"}, {"ignore_eos": True, "max_tokens": 200}])
def test_a_call_that_is_not_closed_is_the_only_one_too(servers: dict[str, Live], options: dict[str, Any]) -> None:
    reply = chat(servers["gemma"], "not closed", "gemma", tools=TOOLS, parallel_tool_calls=False, **options)
    assert (called(reply["choices"][0]), reply["choices"][0]["finish_reason"]) == (["f"], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
def test_responses_return_one_call_on_request(servers: dict[str, Live], name: str, stream: bool) -> None:
    tools: list[Any] = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]

    def items(turn: str, **options: Any) -> list[Any]:
        asked = {"model": MODEL, "input": "Both.", "extra_body": {"seed": SEED[name][turn]}, **options}
        if not stream:
            return list(openai_client(servers[name]).responses.create(**asked).output)
        events = list(openai_client(servers[name]).responses.create(stream=True, **asked))
        assert events[-1].type == "response.completed"
        return list(events[-1].response.output)

    def calls(**options: Any) -> list[str]:
        return [item.name for item in items("calls", tools=tools, **options) if item.type == "function_call"]

    assert calls() == calls(parallel_tool_calls=True, tool_choice="required") == ["f", "g"]
    assert calls(parallel_tool_calls=False) == ["f"]
    if name != "gemma":
        thought, answer = items("answer")
        assert (thought.content[0].text, answer.content[0].text) == (THOUGHT, ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_messages_return_one_call_on_request(servers: dict[str, Live], name: str, stream: bool) -> None:
    client = anthropic.Anthropic(base_url=servers[name].address, api_key=KEY, max_retries=0)
    tools: Any = [{"name": tool["function"]["name"], "input_schema": FREE} for tool in TOOLS]

    def blocks(turn: str, **options: Any) -> tuple[list[Any], str | None]:
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "messages": ASK}
        asked |= {"extra_body": {"seed": SEED[name][turn]}, **options}
        if not stream:
            reply = client.messages.create(**asked)
        else:
            with client.messages.stream(**asked) as events:
                reply = events.get_final_message()
        return list(reply.content), reply.stop_reason

    for kind in ("auto", "any"):
        for limit, names in ((False, ["f", "g"]), (True, ["f"])):
            choice = {"type": kind, "disable_parallel_tool_use": limit}
            found, reason = blocks("calls", tools=tools, tool_choice=choice)
            assert ([block.name for block in found if block.type == "tool_use"], reason) == (names, "tool_use")
    if name != "gemma":
        found, reason = blocks("answer", thinking={"type": "enabled", "budget_tokens": 8000})
        assert (found[0].thinking, found[1].text, reason) == (THOUGHT, ANSWER, "end_turn")


def test_an_answer_is_left_alone(servers: dict[str, Live], name: str) -> None:
    [choice] = chat(servers[name], "text", name, tools=TOOLS, parallel_tool_calls=False)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (
        {"gemma": "No call."}.get(name, "Just text."), "stop",
    )  # fmt: skip


def test_output_as_the_model_wrote_it(servers: dict[str, Live]) -> None:
    for name, options, wanted in (
        ("gemma", {"parallel_tool_calls": False}, GEMMA_THOUGHT + "<|tool_call>call:f{a:1}<tool_call|>"),
        ("chatml", {}, CHATML["calls"]),
    ):
        [choice] = chat(servers[name], "calls", name, tools=TOOLS, skip_special_tokens=False, **options)["choices"]
        assert choice["message"]["content"] == wanted


# ---- ChatML ----------------------------------------------------------------------------------------------------------


def test_reasoning(server: Live) -> None:
    [choice] = chat(server, "answer", logprobs=True)["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == THOUGHT
    assert (message["content"], choice["finish_reason"]) == (ANSWER, "stop")
    hidden = chat(server, "answer", include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in hidden
    assert hidden["content"] == ANSWER
    entries = choice["logprobs"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries["content"]).decode() == ANSWER
    assert b"".join(bytes(entry["bytes"]) for entry in entries["reasoning"]).decode().rstrip("\n") == THOUGHT


@pytest.mark.parametrize("more", [{}, {"stop": [NEVER]}, {"tools": TOOLS}], ids=["fast path", "usual", "tools"])
def test_a_stream_of_an_answer(server: Live, more: dict[str, Any]) -> None:
    choices = streamed(server, "answer", **SLOW, **more)
    assert joined(choices, "reasoning_content") == joined(choices, "reasoning") == THOUGHT
    assert joined(choices, "content") == ANSWER
    assert choices[-1]["finish_reason"] == "stop"
    assert sum(bool(choice["delta"].get("content")) for choice in choices) > 5, "text arrives as it is written"


def test_calls(server: Live) -> None:
    [choice] = chat(server, "calls", tools=TOOLS)["choices"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
    assert calls == [("f", CITY), ("g", "{}")]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("I look.", THOUGHT)
    # Without the tool, the call is text.
    [choice] = chat(server, "calls", tools=TOOLS[1:])["choices"]
    assert called(choice) == ["g"]
    assert CITY in choice["message"]["content"]
    reply = chat(server, "malformed", tools=TOOLS)
    assert reply["choices"][0]["message"]["content"] == "{'name': 'f'}"
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert "call_without_recipient" in json.dumps(reply)


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "f"}}])
def test_a_stream_of_calls(server: Live, choice: Any) -> None:
    """Under a grammar too: strict, required and named calls have schemas that constrain their arguments."""
    choices = streamed(server, "calls", tools=STRICT, tool_choice=choice, **SLOW)
    deltas = [call for each in choices for call in each["delta"].get("tool_calls") or []]
    begun = {call["index"]: call["function"]["name"] for call in deltas if call["function"].get("name")}
    arguments = ["".join(c["function"].get("arguments") or "" for c in deltas if c["index"] == at) for at in begun]
    assert (list(begun.values()), arguments) == (["f", "g"], [CITY, "{}"])
    assert sum(call["index"] == 0 for call in deltas) > 3, "arguments arrive as they are written"
    assert joined(choices, "reasoning_content") == THOUGHT
    assert choices[-1]["finish_reason"] == "tool_calls"


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
def test_reasoning_can_be_switched_off(server: Live, options: dict[str, Any], begun: str) -> None:
    reply = chat(server, "text", return_token_ids=True, **options)
    ids = reply["prompt_token_ids"]
    assert tiny_chatml().decode(ids, show_control=True) == ASKED + begun
    # The user's text stays text, even if it spells a mark.
    assert sum(map(tiny_chatml().is_control, ids)) == 3 + begun.count("<")
    assert reply["choices"][0]["message"]["content"] == "Just text."


def test_results_go_back_to_the_model(server: Live) -> None:
    past = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    talk = [*ASK, {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [past]}]
    talk.append({"role": "tool", "tool_call_id": "c1", "content": "18 </tool_response>"})
    ids = post(server, "/tokenize", messages=talk, tools=TOOLS)["tokens"]
    text = tiny_chatml().decode(ids, show_control=True)
    assert '"name": "f"' in text.partition("<tools>")[2].partition("</tools>")[0]
    assert text.endswith(
        '<|im_start|>assistant\n<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"city": "Paris"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n18 </tool_response>\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_forms_are_compiled_and_wrong_ones_refused(servers: dict[str, Live]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    for each in ("chatml", "thinker"):
        for options in ({}, {"tools": STRICT}, {"chat_template_kwargs": {"enable_thinking": False}}):
            assert chat(servers[each], "text", response_format=form, **options)["choices"]
    impossible = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools: Any = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": impossible}}]
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\]\.function\.parameters"):
        openai_client(servers["chatml"]).chat.completions.create(model=MODEL, messages=ASK, tools=tools)


def test_reasoning_that_the_prompt_begins(servers: dict[str, Live]) -> None:
    thinker = servers["thinker"]
    reply = chat(thinker, "begun", return_token_ids=True)
    assert tiny_chatml().decode(reply["prompt_token_ids"], show_control=True) == ASKED + "<think>\n"
    message = reply["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (THOUGHT, "The answer is 4.")
    choices = streamed(thinker, "begun")
    assert (joined(choices, "reasoning_content"), joined(choices, "content")) == (THOUGHT, "The answer is 4.")


def test_an_answer_is_continued(servers: dict[str, Live]) -> None:
    begun = [*ASK, {"role": "assistant", "content": "So:\n"}]
    options = {"continue_final_message": True, "add_generation_prompt": False, "return_token_ids": True}
    for each, thought in (("chatml", ""), ("thinker", "<think>\n\n</think>\n\n")):
        body = {"messages": begun, "seed": SEED["chatml"]["text"], **options}
        reply = post(servers[each], "/v1/chat/completions", **body)
        text = tiny_chatml().decode(reply["prompt_token_ids"], show_control=True)
        assert text == f"{ASKED}{thought}So:\n"
        assert reply["choices"][0]["message"]["content"] == "Just text."


def test_raw_text_shows_marks_that_are_not_special(server: Live) -> None:
    """As the tokenizer's file says: programs cut reasoning off at the ``</think>`` of a completion."""
    body = {"prompt": "<|im_start|>user\nHi", "max_tokens": 400, "logprobs": 0, "seed": SEED["chatml"]["calls"]}
    stops = [tiny_chatml().control["<|im_end|>"]]
    [choice] = post(server, "/v1/completions", **body, stop_token_ids=stops, return_token_ids=True)["choices"]
    assert choice["text"] == CHATML["calls"].removesuffix("<|im_end|>")
    entries = choice["logprobs"]
    places = list(zip(entries["text_offset"], entries["tokens"], strict=True))[:-1]
    assert all(choice["text"].startswith(token, at) for at, token in places if not token.startswith("bytes:"))
    # Nothing is added before the prompt.
    assert choice["prompt_token_ids"] == tiny_chatml().encode_with_control("<|im_start|>user\nHi")


# ---- XML calls -------------------------------------------------------------------------------------------------------

PARIS = '{"city": "Paris \\"{\\" 日本", "days": 3}'
DAYS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "strict": strict,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
    for strict in (True, False)
]


@pytest.mark.parametrize(
    ("choice", "tools"),
    [
        ("auto", [DAYS[0], STRICT[1]]),
        ("required", [DAYS[1], TOOLS[1]]),
        ({"type": "function", "function": {"name": "f"}}, [DAYS[1], TOOLS[1]]),
    ],
)
def test_a_stream_of_xml_calls(servers: dict[str, Live], choice: Any, tools: list[Any]) -> None:
    choices = streamed(servers["chatml_xml"], "calls", "chatml_xml", tools=tools, tool_choice=choice, **SLOW)
    deltas = [call for each in choices for call in each["delta"].get("tool_calls") or []]
    begun = {call["index"]: call["function"]["name"] for call in deltas if call["function"].get("name")}
    arguments = ["".join(c["function"].get("arguments") or "" for c in deltas if c["index"] == at) for at in begun]
    assert (list(begun.values()), arguments) == (["f", "g"], [PARIS, "{}"])
    assert sum(call["index"] == 0 for call in deltas) > 3, "texts in arguments arrive as they are written"
    assert joined(choices, "reasoning_content") == THOUGHT
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_xml_calls(servers: dict[str, Live]) -> None:
    server = servers["chatml_xml"]
    [choice] = chat(server, "in thoughts", "chatml_xml", tools=DAYS[1:])["choices"]
    assert (called(choice), choice["finish_reason"]) == (["f"], "tool_calls")
    assert choice["message"]["reasoning_content"] == THOUGHT
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == PARIS
    # Without tools, or where none may be called, it is text.
    for options in ({}, {"tools": DAYS[1:], "tool_choice": "none"}):
        [choice] = chat(server, "calls", "chatml_xml", **options)["choices"]
        assert (called(choice), choice["finish_reason"]) == ([], "stop")
        assert "<parameter=city>" in choice["message"]["content"]


def test_xml_schemas_are_compiled_and_wrong_ones_refused(servers: dict[str, Live]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    for options in ({}, {"tools": DAYS[:1]}, {"chat_template_kwargs": {"enable_thinking": False}}):
        assert chat(servers["chatml_xml"], "answer", "chatml_xml", response_format=form, **options)["choices"]
    for properties, problem in (
        ({"a": {"type": "string", "pattern": "("}}, r"tools\[0\]\.function\.parameters"),
        ({"a": {"type": "string", "format": "email"}}, r"tools\[0\]\.function\.strict is not possible.*email"),
    ):
        schema = {"type": "object", "properties": properties}
        tools: Any = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}]
        with pytest.raises(openai.BadRequestError, match=problem):
            openai_client(servers["chatml_xml"]).chat.completions.create(model=MODEL, messages=ASK, tools=tools)


@pytest.mark.parametrize(
    ("options", "kept", "begun"),
    [
        ({}, "", "<think>\n"),
        ({"enable_thinking": True, "preserve_thinking": True}, "<think>\nHm.\n</think>\n\n", "<think>\n"),
        ({"enable_thinking": False, "preserve_thinking": False}, "", "<think>\n\n</think>\n\n"),
    ],
)
def test_template_options(servers: dict[str, Live], options: dict[str, Any], kept: str, begun: str) -> None:
    talk = [*ASK, {"role": "assistant", "reasoning_content": "Hm.", "content": "4"}, {"role": "user", "content": "5?"}]
    again = "<|im_start|>user\n5?<|im_end|>\n<|im_start|>assistant\n"
    ids = post(servers["chatml_xml"], "/tokenize", messages=talk, chat_template_kwargs=options)["tokens"]
    assert tiny_chatml().decode(ids, show_control=True) == f"{ASKED}{kept}4<|im_end|>\n{again}{begun}"


# ---- Gemma's <bos> before a raw prompt -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "options", "begins"),
    [
        ("the world", {}, True),
        ("the world", {"add_special_tokens": True}, True),
        ("the world", {"add_special_tokens": False}, False),
        ("<bos>the world", {}, True),
        (["the world", "<bos>the world"], {}, True),
        (tiny_gemma().encode("the world"), {}, False),
        ([tiny_gemma().encode("the world")], {"add_special_tokens": True}, False),
    ],
)
def test_a_raw_prompt_begins_with_bos(
    servers: dict[str, Live], prompt: Any, options: dict[str, Any], begins: bool
) -> None:
    wanted = tiny_gemma().encode_with_control("<bos>" if begins else "") + tiny_gemma().encode("the world")
    body = {"prompt": prompt, "max_tokens": 3, "return_token_ids": True, "seed": SEED["gemma"]["text"], **options}
    found = post(servers["gemma"], "/v1/completions", **body)
    assert all(choice["prompt_token_ids"] == wanted for choice in found["choices"])
    assert found["usage"]["prompt_tokens"] == len(wanted) * len(found["choices"])
    # An echo is what was sent, without the added token.
    echoed = post(servers["gemma"], "/v1/completions", **body, echo=True)["choices"]
    sent = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else [prompt]
    texts = [text if isinstance(text, str) else "the world" for text in sent]
    assert [choice["text"] for choice in echoed] == [f"{text}No " for text in texts]


def test_tokenize_follows_the_same_rule(servers: dict[str, Live]) -> None:
    def tokens(**body: Any) -> list[int]:
        return list(post(servers["gemma"], "/tokenize", **body)["tokens"])

    plain = tiny_gemma().encode("the world")
    bos = tiny_gemma().control["<bos>"]
    assert tokens(prompt="the world") == tokens(prompt="<bos>the world") == [bos, *plain]
    assert tokens(prompt="the world", add_special_tokens=False) == plain
    # A chat's template already has it.
    assert tokens(messages=ASK, add_special_tokens=True).count(bos) == 1
