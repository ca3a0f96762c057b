"""What becomes of a request's keys: read, passed over and named, or refused with what is possible."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from microscale.server.error_texts import BadField
from microscale.server.openai.chat.schema import ChatRequest
from microscale.server.openai.completions.schema import CompletionRequest
from microscale.server.requests.base import IGNORED_HEADER, MAX_NAMED
from microscale.server.requests.parsing import parse
from support.live_server import KEY, SEEDS, Live, live

HEADERS = {"Authorization": f"Bearer {KEY}"}
ASK = [{"role": "user", "content": "Hi"}]
ANSWER = "The answer is 4. 日本"
THOUGHT = "Let me think: naïve 👩‍👧."


def chat(server: Live, **fields: Any) -> httpx.Response:
    body = {"messages": ASK, "seed": SEEDS["answer"]} | fields
    return httpx.post(f"{server.v1}/chat/completions", json=body, headers=HEADERS, timeout=30)


def message(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["choices"][0]["message"])


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


# ---- passed over -----------------------------------------------------------------------------------------------------


def test_unknown_keys_are_passed_over_and_named_once_each(server: Live) -> None:
    handed_back = {
        "role": "assistant",
        "content": "Yes.",
        "parsed": None,
        "provider_specific_fields": {"a": 1},
        "tool_calls": [
            {
                "id": "c",
                "type": "function",
                "caller": {"type": "direct"},
                "function": {"name": "get_weather", "arguments": "{}", "parsed_arguments": {}},
            }
        ],
    }
    parts = [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]
    told = [*ASK, handed_back, {"role": "tool", "tool_call_id": "c", "content": "sun", "name": "w", "status": "ok"}]
    reply = chat(
        server, messages=[*told, {"role": "user", "content": parts}, *told], client_metadata={"a": 1}, user="me"
    )
    assert message(reply)["content"] == ANSWER
    assert set(reply.headers[IGNORED_HEADER].split(", ")) == {
        "client_metadata",
        "user",
        "messages.provider_specific_fields",
        "messages.tool_calls.caller",
        "messages.tool_calls.function.parsed_arguments",
        "messages.status",
        "messages.content.cache_control",
    }
    log = server.log.read_text()
    chat(server, client_metadata={})
    assert log.count("key client_metadata:") == server.log.read_text().count("key client_metadata:") == 1


def test_a_stream_names_them_too(server: Live) -> None:
    reply = chat(server, stream=True, new_in_december=True)
    assert reply.headers[IGNORED_HEADER] == "new_in_december"
    assert IGNORED_HEADER not in chat(server, stream=True).headers


def test_what_clients_call_their_keys_cannot_forge_a_header(server: Live) -> None:
    evil = {"a\r\nset-cookie: b": 1, "ü": 1, "x" * 65: 1, **{f"key{n}": n for n in range(100)}}
    reply = chat(server, **evil)
    assert reply.status_code == 200
    assert "set-cookie" not in reply.headers
    named = reply.headers[IGNORED_HEADER].split(", ")
    assert named[0] == "?"
    assert len(named) == MAX_NAMED + 1
    assert named[-1] == "..."


JUNK: list[Any] = [1, "text", [], {"deep": {"er": [1, None]}}, None, True, 1.5, [[{}]]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("path", ["chat/completions", "responses", "completions"])
def test_random_keys_at_every_level_lose_nothing(server: Live, seed: int, path: str) -> None:
    chance = random.Random(seed)

    def salted(value: Any, frozen: bool = False) -> Any:
        if isinstance(value, list):
            return [salted(item, frozen) for item in value]
        if not isinstance(value, dict):
            return value
        grown = {name: salted(inner, frozen or name in ("parameters", "schema")) for name, inner in value.items()}
        # A schema's keys are the schema's; those of requests are what is salted.
        return grown if frozen else grown | {f"zz_{chance.randrange(10**6)}": chance.choice(JUNK) for _ in range(2)}

    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "a"},
                *ASK,
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "response_format": {"type": "text"},
            "stream_options": {"include_usage": True},
        },
        "responses": {
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "tools": [{"type": "function", "name": "f", "parameters": schema}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
        "completions": {"prompt": "Hi", "stream_options": {"include_usage": True}, "max_tokens": 20},
    }  # fmt: skip
    body = bodies[path] | {"stream": True, "seed": SEEDS["answer"]}
    plain, grown = (
        httpx.post(f"{server.v1}/{path}", json=sent, headers=HEADERS, timeout=30) for sent in (body, salted(body))
    )
    assert plain.status_code == grown.status_code == 200, grown.text
    assert "zz_" in grown.headers[IGNORED_HEADER]

    def text(reply: httpx.Response) -> str:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        deltas = [event.get("delta") for event in events if isinstance(event.get("delta"), str)]
        for event in events:
            deltas += [
                choice.get("text") or choice.get("delta", {}).get("content") for choice in event.get("choices", ())
            ]
        return "".join(filter(None, deltas))

    assert text(plain) == text(grown) != ""


# API → a good request, a harmless key, and requests that ``--strict-requests`` refuses.
STRICT: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "chat/completions": (
        {"messages": ASK},
        {"user": "me", "store": True},
        [({"new_in_december": 1}, "new_in_december"), ({"messages": [{**ASK[0], "parsed": 1}]}, "messages.parsed")],
    ),
    "responses": (
        {"input": "x"},
        {"client_metadata": {}, "prompt_cache_key": "k"},
        [
            ({"tools": [{"type": "web_search"}]}, "tools.web_search"),
            ({"include": ["file_search_call.results"]}, "include.file_search_call.results"),
            ({"input": [{"type": "compaction"}]}, "input.compaction"),
        ],
    ),
    "messages": (
        {"messages": ASK, "max_tokens": 50},
        {"metadata": {"user_id": "u"}},
        [({"x1": 1}, "x1"), ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.web_search_20250305")],
    ),
}


def test_strict_requests_refuse_unknown_keys(tmp_path: Path) -> None:
    with live(tmp_path / "log", step_s=0, strict_requests=True) as strict:
        for path, (good, harmless, wrong) in STRICT.items():
            body = good | {"seed": SEEDS["answer"]}
            accepted = httpx.post(f"{strict.v1}/{path}", json=body | harmless, headers=HEADERS)
            assert accepted.status_code == 200, accepted.text
            for fields, param in wrong:
                reply = httpx.post(f"{strict.v1}/{path}", json=body | fields, headers=HEADERS)
                error = reply.json()["error"]
                assert (reply.status_code, param in error["message"]) == (400, True), reply.text
                assert error.get("code", "unknown_parameter") == "unknown_parameter"


# ---- refused ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_value", "only text"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_value", "tools"),
    ({"chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter", "part of the model"),
    ({"typical_p": 0.5}, "typical_p", "unsupported_value", "top_p"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter", "/v1/completions"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value", "text, json_object, json_sch"),
    ({"temperature": "hot"}, "temperature", "invalid_type", "number"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", "required"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "unsupported_value",
        "this model reads only text",
    ),
    ({"messages": [{"role": "user", "content": "a " * 6000}]}, "prompt", "context_length_exceeded", "4096"),
    ({"reasoning_effort": "huge"}, "reasoning_effort", "unsupported_value", "xhigh"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value", "at least 1"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "invalid_value", "bo"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code", "says"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_would_change_the_answer_is_refused(
    server: Live, fields: dict[str, Any], param: str, code: str, says: str
) -> None:
    reply = chat(server, **fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert says in error["message"]


def test_neutral_values_of_what_cannot_be_had_are_fine() -> None:
    body = {"messages": ASK, "typical_p": 1.0, "mirostat": 0, "functions": [], "modalities": ["text"], "best_of": 1}
    assert parse(ChatRequest, json.dumps(body).encode())[1] == []
    with pytest.raises(BadField, match="suffix"):
        parse(CompletionRequest, b'{"prompt": "a", "suffix": "b"}')
    with pytest.raises(BadField, match="best_of"):
        parse(CompletionRequest, b'{"prompt": "a", "best_of": 2}')


# ---- honoured --------------------------------------------------------------------------------------------------------


def prompt_text(server: Live, **fields: Any) -> str:
    body = {"messages": ASK, "return_token_strs": True} | fields
    reply = httpx.post(f"{server.address}/tokenize", json=body, headers=HEADERS, timeout=30)
    assert reply.status_code == 200, reply.text
    return "".join(reply.json()["token_strs"])


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "none"}, "low"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning_effort": "xhigh"}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "low"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "medium"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, "high"),
    ],
)
def test_efforts_are_mapped_to_those_of_the_model(server: Live, fields: dict[str, Any], effort: str) -> None:
    assert f"Reasoning: {effort}" in prompt_text(server, **fields)


def test_other_template_options_are_named(server: Live) -> None:
    reply = chat(server, chat_template_kwargs={"enable_thinking": True, "preserve_tags": 1})
    assert reply.headers[IGNORED_HEADER] == "chat_template_kwargs.preserve_tags"


def test_verbosity_is_told_in_words(server: Live) -> None:
    assert "final answer short" in prompt_text(server, verbosity="low")
    told = prompt_text(server, verbosity="high", messages=[{"role": "system", "content": "Be kind."}, *ASK])
    assert "Be kind." in told.partition("detailed")[0]
    assert prompt_text(server, verbosity="medium") == prompt_text(server)


def test_the_prompts_end_can_be_chosen(server: Live) -> None:
    begun = [*ASK, {"role": "assistant", "content": "The answer", "reasoning": "Hm."}]
    assert prompt_text(server).endswith("<|start|>assistant")
    assert prompt_text(server, add_generation_prompt=False).endswith("Hi<|end|>")
    assert prompt_text(server, messages=begun, continue_final_message=True).endswith(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>The answer"
    )
    thinking = [*ASK, {"role": "assistant", "reasoning": "Let me"}]
    assert prompt_text(server, messages=thinking, continue_final_message=True).endswith(
        "<|start|>assistant<|channel|>analysis<|message|>Let me"
    )
    for wrong in (ASK, [*ASK, {"role": "assistant", "content": ""}]):
        assert chat(server, messages=wrong, continue_final_message=True).status_code == 400


def test_an_answer_goes_on_in_the_message_that_was_begun(server: Live) -> None:
    begun = [*ASK, {"role": "assistant", "content": "It is: "}]
    said = message(chat(server, messages=begun, continue_final_message=True, seed=SEEDS["no header"]))
    assert said["content"] == "Just text."
    assert "reasoning" not in said
    thinking = [*ASK, {"role": "assistant", "reasoning": "Let me"}]
    said = message(chat(server, messages=thinking, continue_final_message=True, seed=SEEDS["no header"]))
    assert said["reasoning"] == "Just text."
    form = {"type": "json_object"}
    refused = chat(server, messages=begun, continue_final_message=True, response_format=form)
    assert refused.json()["error"]["param"] == "continue_final_message"


def test_reasoning_can_be_left_out(server: Live) -> None:
    said = message(chat(server, include_reasoning=False, logprobs=True))
    assert said["content"] == ANSWER
    assert "reasoning" not in said
    assert "reasoning_content" not in said
    streamed = chunks(chat(server, include_reasoning=False, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in streamed]
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert not any("reasoning" in delta for delta in deltas)
    assert all(delta.get("content") for delta in deltas[1:-1])


def test_special_tokens_can_be_shown(server: Live) -> None:
    said = message(chat(server, skip_special_tokens=False))
    assert said["content"].startswith("<|channel|>analysis<|message|>Let me think")
    assert said["content"].endswith("<|return|>")
    body = {"prompt": "x", "seed": SEEDS["plain"], "max_tokens": 50, "stop_token_ids": [], "skip_special_tokens": False}
    text = httpx.post(f"{server.v1}/completions", json=body, headers=HEADERS).json()["choices"][0]["text"]
    assert "three<|endoftext|>one" in text


def test_a_stop_string_can_be_kept(server: Live) -> None:
    cut = chat(server, stop=["is"])
    kept = chat(server, stop=["is"], include_stop_str_in_output=True)
    assert (message(cut)["content"], message(kept)["content"]) == ("The answer ", "The answer is")
    streamed = chunks(chat(server, stop=["is"], include_stop_str_in_output=True, stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == "The answer is"


def test_minus_one_is_not_set(server: Live) -> None:
    assert message(chat(server, max_tokens=-1))["content"] == ANSWER
    reply = chat(server, seed=-1, max_tokens=5)
    assert reply.status_code == 200
    assert chat(server, max_tokens=-2).status_code == 400


def test_usage_can_come_with_every_chunk(server: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    streamed = chunks(chat(server, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in streamed]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 40)
    assert streamed[-1]["choices"] == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "is"])
def test_logprobs_align_with_content_at_every_chunk(server: Live, stream: bool, stop: str | None) -> None:
    reply = chat(server, stream=stream, logprobs=True, top_logprobs=1, stop=stop)
    choices = [chunk["choices"][0] for chunk in chunks(reply)] if stream else [reply.json()["choices"][0]]
    content, tokens, thought = "", b"", b""
    for choice in choices:
        content += (choice["delta"] if stream else choice["message"]).get("content") or ""
        tokens += b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
        thought += b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"].get("reasoning", []))
        # A token may end within a character, which then shows with the next.
        assert tokens.startswith(content.encode())
    assert tokens == content.encode()
    assert content == ("The answer " if stop else ANSWER)
    assert thought.decode() == THOUGHT


@pytest.mark.parametrize("grammar", ['start: "yes" | "no"', 'root ::= answer\nanswer ::= "yes" | "no"\n'])
@pytest.mark.parametrize("field", ["guided_grammar", "structured_outputs"])
def test_grammars_may_be_lark_or_ebnf(server: Live, grammar: str, field: str) -> None:
    value: Any = grammar if field == "guided_grammar" else {"grammar": grammar}
    assert chat(server, **{field: value}).status_code == 200


@pytest.mark.parametrize("grammar", ["root ::= missing", "root ::= (", "a ::= b ::= c", "root ::= " + "(" * 9000])
def test_a_broken_grammar_is_a_400(server: Live, grammar: str) -> None:
    reply = chat(server, guided_grammar=grammar)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "guided_grammar"
