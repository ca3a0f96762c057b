"""Tools of every kind through ``/v1/responses``, and the items that their calls become."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx2 as httpx
import openai
import pytest

from microscale.server.error_texts import BadField
from microscale.server.openai.responses.output_items import Items
from microscale.server.openai.responses.replies import PieceEvent
from microscale.server.openai.responses.request import ResponsesRequest
from microscale.server.openai.responses.store import ResponseStore
from microscale.server.openai.responses.to_chat import messages_of, new_items
from microscale.server.openai.responses.tool_calls import CustomInput, action_of
from microscale.server.openai.responses.toolbox import Toolbox, ToolKind
from microscale.text.output import CallDelta, Delta
from support.live_server import KEY, MODEL, PATCH, SEEDS, TOOL_CALLS, Live

HEADERS = {"Authorization": f"Bearer {KEY}"}
CUSTOM: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files."}


def post(server: Live, body: Any) -> httpx.Response:
    return httpx.post(f"{server.v1}/responses", json=body, headers=HEADERS, timeout=60)


def said_again(server: Live, body: Any) -> str:
    """What the model hears: without a seed the prompt is said again, here beyond the ends of its turns."""
    count = {key: value for key, value in body.items() if key != "stream"}
    counted = httpx.post(f"{server.v1}/responses/input_tokens", json=count, headers=HEADERS, timeout=60)
    assert counted.json()["object"] == "response.input_tokens"
    length = counted.json()["input_tokens"]
    reply = post(server, count | {"max_output_tokens": length, "ignore_eos": True, "tool_choice": "none"})
    assert reply.status_code == 200, reply.text
    texts = []
    for item in reply.json()["output"]:
        texts += [part["text"] for part in item.get("content", [])]
    return "".join(texts)


def test_a_namespace_is_unwrapped_and_its_calls_come_back_with_it(server: Live) -> None:
    group = {"type": "namespace", "name": "multi_agent", "tools": [function("spawn_agent"), function("wait")]}
    body = {"input": "x", "tools": [group, {"type": "web_search"}], "seed": SEEDS["spawn_agent"]}
    reply = post(server, body).json()
    call = reply["output"][-1]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "multi_agent", "spawn_agent")
    assert reply["tools"] == [group]


# ---- kinds -----------------------------------------------------------------------------------------------------------


def create(client: openai.OpenAI, tool: str, **options: Any) -> Any:
    asked = {"model": MODEL, "input": "Do it."} | options
    return client.responses.create(**asked, extra_body={"seed": SEEDS[tool]})


def test_a_custom_tool_there_and_back(client: openai.OpenAI) -> None:
    events = list(create(client, "apply_patch", tools=[CUSTOM], stream=True))
    deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    assert done.input == PATCH
    final = events[-1].response
    call = final.output[-1]
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", PATCH)
    assert done.item_id == call.id
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done."}
    sent: list[Any] = [{"role": "user", "content": "x"}, *(item.model_dump() for item in final.output), result]
    for more in ({"input": sent}, {"input": [result], "previous_response_id": final.id}):
        asked: Any = {"model": MODEL, "tools": [CUSTOM], "extra_body": {"seed": SEEDS["answer"]}} | more
        assert client.responses.create(**asked).output_text == "The answer is 4. 日本"


def test_custom_input_is_told_as_it_comes() -> None:
    items = Items(toolbox([CUSTOM]))
    events = list(items.add(Delta((), calls=(CallDelta(0, "apply_patch", ""),))))
    for letter in TOOL_CALLS["apply_patch"]:
        events += items.add(Delta((), calls=(CallDelta(0, None, letter),)))
    deltas = [event.delta for event in events if isinstance(event, PieceEvent)]
    assert len(deltas) > 30
    assert "".join(map(str, deltas)) == PATCH
    done, last = items.close("completed")
    assert (done.type, last.type) == ("response.custom_tool_call_input.done", "response.output_item.done")


def test_a_grammar_is_told_and_named(server: Live) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /zebra+/"}
    body = {"input": "x", "tools": [CUSTOM | {"format": form}], "max_output_tokens": 900}
    reply = post(server, body)
    assert "start: /zebra+/" in reply.text
    assert reply.headers["x-microscale-ignored"] == "tools.format"
    text = post(server, body | {"tools": [CUSTOM | {"format": {"type": "text"}}], "max_output_tokens": 5})
    assert "x-microscale-ignored" not in text.headers


def test_shells_and_patches_come_back_as_their_own_items(server: Live, client: openai.OpenAI) -> None:
    for tool, seed, kind in (
        ("local_shell", "local_shell", "local_shell_call"),
        ("shell", "shell", "shell_call"),
        ("apply_patch", "apply_patch_file", "apply_patch_call"),
    ):
        options: Any = {"tools": [{"type": tool}], "input": "x"}
        if tool == "shell":
            options["tools"] = [{"type": "shell", "environment": {"type": "local"}}]
        events = list(create(client, seed, stream=True, **options))
        added = [event.item.type for event in events if event.type == "response.output_item.added"]
        assert added == ["reasoning", kind]
        call = events[-1].response.output[-1]
        assert (call.type, call.status) == (kind, "completed")
        if tool == "local_shell":
            assert (call.action.command, call.action.timeout_ms, call.action.env) == (["ls", "-l"], 5, {})
            result: Any = {"type": "local_shell_call_output", "id": call.id, "output": "total 0"}
        elif tool == "shell":
            assert call.action.commands == ["ls", "pwd"]
            outcome = {"type": "exit", "exit_code": 0}
            output = [{"stdout": "total 0", "stderr": "", "outcome": outcome}]
            result = {"type": "shell_call_output", "call_id": call.call_id, "output": output}
        else:
            assert (call.operation.type, call.operation.path) == ("delete_file", "a.txt")
            result = {"type": "apply_patch_call_output", "call_id": call.call_id, "status": "completed"}
            result["output"] = "total 0"
        sent: Any = [{"role": "user", "content": "x"}, call.model_dump(), result]
        heard = said_again(server, {"input": sent, "tools": options["tools"]})
        assert json.dumps(json.loads(TOOL_CALLS[seed])) in heard, heard[-500:]
        assert "total 0" in heard


def test_arguments_that_say_no_action_are_not_lost(client: openai.OpenAI) -> None:
    events = list(create(client, "broken shell", tools=[{"type": "shell"}], stream=True))
    call = events[-1].response.output[-1]
    assert (call.type, call.name, call.arguments) == ("function_call", "shell", "ls -l")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert deltas == ["ls -l"]
    cut = create(client, "local_shell", tools=[{"type": "local_shell"}], max_output_tokens=40)
    assert (cut.status, cut.output[-1].type, cut.output[-1].status) == ("incomplete", "function_call", "incomplete")


HOSTED = ["web_search", "code_interpreter", "x_new"]


@pytest.mark.parametrize("kind", HOSTED)
def test_hosted_tools_are_ignored_and_cannot_be_chosen(server: Live, kind: str) -> None:
    body = {"input": "x", "tools": [{"type": kind, "some": {"key": 1}}], "seed": SEEDS["answer"]}
    reply = post(server, body)
    assert reply.status_code == 200
    assert reply.headers["x-microscale-ignored"] == f"tools.{kind}"
    assert reply.json()["tools"] == []
    for choice in ({"type": kind}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": kind}]}):
        refused = post(server, body | {"tool_choice": choice})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == "tool_choice"
    auto = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": kind}]}
    assert post(server, body | {"tool_choice": auto}).status_code == 200


def test_a_shell_in_a_container_is_hosted(server: Live) -> None:
    tools = [{"type": "shell", "environment": {"type": "container_auto"}}]
    reply = post(server, {"input": "x", "tools": tools, "seed": SEEDS["answer"]})
    assert reply.headers["x-microscale-ignored"] == "tools.shell"


# ---- choices ---------------------------------------------------------------------------------------------------------


def toolbox(tools: list[Any], choice: Any = None) -> Toolbox:
    request = ResponsesRequest.model_validate({"input": "x", "tools": tools, "tool_choice": choice})
    return Toolbox(request.tools or [], request.tool_choice)


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name}


def test_choices_name_tools_of_every_kind() -> None:
    group = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [function("find"), CUSTOM]}
    tools = [function("a"), function("find"), group, {"type": "local_shell"}]
    heard = [spec.function.name for spec in toolbox(tools).specs]
    assert heard == ["a", "find", "crm__find", "apply_patch", "local_shell"]
    for choice, name in (
        (function("a"), "a"),
        (function("find") | {"namespace": "crm"}, "crm__find"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "local_shell"}, "local_shell"),
    ):
        chosen: Any = toolbox(tools, choice).choice
        assert chosen.function.name == name
    named = {"type": "allowed_tools", "mode": "required", "tools": [function("a"), {"type": "local_shell"}]}
    allowed = toolbox(tools, named)
    assert (allowed.choice, [spec.function.name for spec in allowed.specs]) == ("required", ["a", "local_shell"])
    for wrong in (function("b"), {"type": "custom", "name": "a"}, {"type": "function"}, {"type": "shell"}):
        with pytest.raises(BadField, match="tool_choice"):
            toolbox(tools, wrong)


def test_more_tools_than_are_taken(server: Live) -> None:
    tools = [function(f"f{number}") for number in range(200)]
    group = {"type": "namespace", "name": "n", "tools": tools}
    named = {"type": "allowed_tools", "mode": "auto", "tools": [function("f0")] * 20000}
    for body, where in (
        ({"tools": tools}, "tools"),
        ({"tools": [group]}, "tools"),
        ({"tools": tools[:100], "tool_choice": named}, "tool_choice"),
    ):
        refused = post(server, {"input": "x"} | body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, where)


def test_a_forced_custom_call(client: openai.OpenAI) -> None:
    reply = create(client, "apply_patch", tools=[CUSTOM], tool_choice={"type": "custom", "name": "apply_patch"})
    assert reply.output[-1].input == PATCH
    assert reply.tool_choice.name == "apply_patch"


def test_errors_name_the_tool_where_it_stands(server: Live) -> None:
    wrong = function("f") | {"parameters": {"not": {}}, "strict": True}
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [wrong]}]
    error = post(server, {"input": "x", "tools": tools}).json()["error"]
    assert error["param"] == "tools[1].tools[0].parameters", error


def test_earlier_calls_are_those_of_the_tools_that_the_model_hears_of() -> None:
    group = {"type": "namespace", "name": "crm", "description": "", "tools": [function("find")]}
    said = [
        {"type": "function_call", "call_id": "1", "name": "find", "namespace": "crm", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "2", "name": "p", "input": 'a "b"'},
        {
            "type": "local_shell_call",
            "call_id": "3",
            "id": "l",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "apply_patch_call", "call_id": "4", "operation": {"type": "delete_file", "path": "a"}},
    ]
    items = new_items(ResponsesRequest.model_validate({"input": said}), (), ResponseStore(), "")
    (message,) = messages_of(items, toolbox([function("find"), group]))
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]  # type: ignore[union-attr]
    assert calls == [
        ("crm__find", {}),
        ("p", {"input": 'a "b"'}),
        ("local_shell", {"command": ["ls"]}),
        ("apply_patch", {"type": "delete_file", "path": "a"}),
    ]


# ---- arguments -------------------------------------------------------------------------------------------------------

INPUTS = ["", "a", 'q " \\ / \n\t\b', "\\u0041", "\\ud83d", "日本 👩‍👧", "}", PATCH]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_custom_input_is_the_same_however_it_is_cut(ascii_only: bool) -> None:
    rng = random.Random(0)
    for text in INPUTS:
        for spaced in (json.dumps({"input": text}, ensure_ascii=ascii_only), json.dumps({"input": text, "x": 1})):
            for _ in range(20):
                reader, told, rest = CustomInput(), "", spaced
                while rest:
                    size = rng.randint(1, 5)
                    told += reader.feed(rest[:size])
                    rest = rest[size:]
                assert told + reader.finish() == text


def test_custom_input_that_is_no_such_json_stands_as_it_is() -> None:
    for given, wanted in (
        ("*** Begin", "*** Begin"),
        ('{"x": 1}', '{"x": 1}'),
        ('{"x": 1, "input": "a"}', "a"),
        ("{ not json", "{ not json"),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\u00', "cut\\u00"),
        ('{"input": "\\ud83d"}', "\ufffd"),
        ('{"input": "\\q"}', "\\q"),
        ('{"x": "' + "y" * 300 + '", "input": "late"}', "late"),
    ):
        reader = CustomInput()
        told = "".join(reader.feed(piece) for piece in given)
        assert told + reader.finish() == wanted, given


def test_actions() -> None:
    assert action_of(ToolKind.LOCAL_SHELL, '{"command": "ls"}')["command"] == ["bash", "-lc", "ls"]  # type: ignore[index]
    assert action_of(ToolKind.SHELL, '{"commands": "ls"}')["commands"] == ["ls"]  # type: ignore[index]
    for kind, text in (
        (ToolKind.LOCAL_SHELL, "{}"),
        (ToolKind.SHELL, '{"commands": [1]}'),
        (ToolKind.APPLY_PATCH, '{"type": "create_file", "path": "a"}'),
        (ToolKind.APPLY_PATCH, '{"type": "move", "path": "a"}'),
    ):
        assert action_of(kind, text) is None
