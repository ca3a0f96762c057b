"""The embedded model: whole, small enough, transformers' own numbers, and right through the real server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from playwright.sync_api import expect

from microscale.engine.config import EngineConfig
from microscale.engine.sampling_params import SamplingParams
from microscale.models import embedded
from microscale.text.chat_format import ChatFormat
from microscale.text.conversation import Effort
from microscale.text.formats import chat_format_for
from microscale.text.tokenizer import Tokenizer
from microscale_lab.quality.checks import ModelAnswer, is_right, parse
from microscale_lab.quality.measure import complete
from microscale_lab.quality.tasks import DEMO_FOLDER, FILE_NAME, HeldOutTask, encode, load_tasks
from support.browser import SCREENS, chromium
from support.loading import load_model
from support.truth import load_transformers

ROOT = Path(__file__).parents[2]
LIMIT = 24 << 20
HEAD_LIMIT = 4 << 20
PATIENCE_S = 120.0
READY_CPU_S = 15.0
"""Of both processes together, until the server is ready. Other tests add to the clock, and little to this."""
MAX_TOKENS = 320
ASKED = 4
"""Held-out prompts of a kind."""
RIGHT = 3
"""Of them at least. The server tells the model today's date, so an answer may change from one day to another."""


@dataclass(frozen=True)
class Running:
    address: str
    log: str
    start_cpu_s: float

    def ask(self, calls: Sequence[Callable[[openai.AsyncOpenAI], Awaitable[Any]]]) -> list[Any]:
        """All at once: the engine answers them together."""

        async def gathered() -> list[Any]:
            async with openai.AsyncOpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0) as client:
                return await asyncio.gather(*(call(client) for call in calls))

        return asyncio.run(gathered())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """What `make serve` starts, on a free port."""
    log = tmp_path_factory.mktemp("demo") / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "microscale", "serve", "--device", "cpu", "--port", "0"],
            stdout=out,
            stderr=out,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"Serving .* at (http://\S+)", log.read_text())):
            assert time.monotonic() < deadline, f"not ready after {PATIENCE_S} s: {log.read_text()}"
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Running(found[1], log.read_text(), cpu_s(process.pid))
    finally:
        process.kill()
        process.wait()


def cpu_s(pid: int) -> float:
    """Seconds that a process and its children have computed."""
    # After the name in brackets: state, then numbers; the 12th and 13th are ticks in user mode and in the kernel's.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_s, map(int, children)))


@pytest.fixture(scope="module")
def chat_format() -> ChatFormat:
    return chat_format_for(Tokenizer.load(DEMO_FOLDER))


def tasks(kind: str) -> list[HeldOutTask]:
    return [task for task in load_tasks(DEMO_FOLDER / FILE_NAME, ASKED) if task.task == kind]


def chat(task: HeldOutTask) -> Callable[[openai.AsyncOpenAI], Awaitable[Any]]:
    """The task as a client asks it."""
    fields: dict[str, Any] = {}
    if task.options.tools:
        fields["tools"] = [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in task.options.tools
        ]
    if (form := task.options.response_format) is not None:
        fields["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": form.name, "schema": form.schema},
        }
    effort = task.options.effort
    assert effort is not None
    fields["reasoning_effort"] = effort.value
    return lambda client: client.chat.completions.create(
        model=embedded.SERVED_NAME,
        messages=[{"role": message.role.value, "content": message.content} for message in task.messages],  # type: ignore[misc]
        temperature=0,
        max_tokens=MAX_TOKENS,
        **fields,
    )


def with_effort(task: HeldOutTask, effort: Effort) -> HeldOutTask:
    return replace(task, options=replace(task.options, effort=effort))


def answer_of(reply: Any) -> ModelAnswer:
    message = reply.choices[0].message
    calls = tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ())
    flaws = tuple((reply.choices[0].model_extra or {}).get("flaws", ()))
    return ModelAnswer((message.model_extra or {}).get("reasoning_content", ""), message.content or "", calls, flaws)


def test_it_is_whole_and_small_enough() -> None:
    files = {str(file.relative_to(DEMO_FOLDER)): file for file in DEMO_FOLDER.rglob("*") if file.is_file()}
    assert set(embedded.FILES) <= files.keys()
    head = {name for name in files if name.startswith("draft_head/")}
    assert {DEMO_FOLDER / name for name in head} == set(embedded.DRAFT_HEAD.iterdir())
    assert sum(files[name].stat().st_size for name in files.keys() - head) <= LIMIT
    assert sum(files[name].stat().st_size for name in head) <= HEAD_LIMIT
    assert len([name for name in files.keys() - head if name.endswith(".safetensors")]) <= 2
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["microscale"]
    for name in files:
        # A pattern's * ends at a folder.
        assert any(fnmatch(f"demo_model/{name}", at) and at.count("/") == 1 + name.count("/") for at in data)


def test_its_greedy_answers_are_those_of_transformers(chat_format: ChatFormat) -> None:
    """Over prompt and answer, transformers' largest logit is our next token at every position."""
    kinds = ("addition", "capitals", "tools", "json", "stories")
    encoded = [encode(tasks(kind)[0], chat_format) for kind in kinds]
    ours = load_model(EngineConfig(embedded.NAME, device="cpu", dtype="float32"))
    answers = complete(ours, encoded, SamplingParams(max_tokens=MAX_TOKENS))
    theirs = load_transformers(DEMO_FOLDER)
    for item, answer in zip(encoded, answers, strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([item.prompt + answer]), use_cache=False).logits[0]
        assert logits[len(item.prompt) - 1 : -1].argmax(-1).tolist() == answer


def test_serve_says_what_it_is(server: Running) -> None:
    assert f"Serving {embedded.SERVED_NAME}" in server.log
    assert "This is a toy of 30 million parameters" in server.log
    assert "microscale serve openai/gpt-oss-20b" in server.log
    assert server.start_cpu_s < READY_CPU_S


@pytest.mark.parametrize("kind", ["addition", "capitals", "tools", "json"])
def test_held_out_questions(server: Running, kind: str) -> None:
    asked = tasks(kind)
    answers = [answer_of(reply) for reply in server.ask([chat(task) for task in asked])]
    right = [is_right(answer, task.check) for answer, task in zip(answers, asked, strict=True)]
    # A grammar lets nothing through that does not fit its schema.
    assert sum(right) >= (ASKED if kind == "json" else RIGHT), [
        (task.messages[-1].content, answer)
        for answer, task, good in zip(answers, asked, right, strict=True)
        if not good
    ]
    assert all(answer.reasoning and not answer.flaws for answer in answers)


def test_json_without_a_grammar(server: Running, chat_format: ChatFormat) -> None:
    """As token ids: a text completion has no form to keep to."""
    encoded = [encode(task, chat_format) for task in tasks("json")]

    def complete(prompt: list[int]) -> Callable[[openai.AsyncOpenAI], Awaitable[Any]]:
        return lambda client: client.completions.create(
            model=embedded.SERVED_NAME,
            prompt=prompt,
            temperature=0,
            max_tokens=MAX_TOKENS,
            extra_body={"return_token_ids": True},
        )

    replies = server.ask([complete(item.prompt) for item in encoded])
    ids = [reply.choices[0].model_extra["token_ids"] for reply in replies]
    answers = [parse(said, chat_format, ()) for said in ids]
    right = [is_right(answer, item.task.check) for answer, item in zip(answers, encoded, strict=True)]
    assert sum(right) >= RIGHT, [
        (answer.content, item.task.check) for answer, item in zip(answers, encoded, strict=True)
    ]


def test_more_effort_is_more_thought(server: Running) -> None:
    (sum_,) = [task for task in tasks("addition") if task.messages[-1].content == "Compute 57 + 94"]
    replies = server.ask([chat(with_effort(sum_, effort)) for effort in (Effort.LOW, Effort.MEDIUM, Effort.HIGH)])
    answers = [answer_of(reply) for reply in replies]
    lengths = [len(answer.reasoning) for answer in answers]
    assert 0 < lengths[0] < lengths[1] < lengths[2]
    for reply, answer in zip(replies, answers, strict=True):
        assert is_right(answer, sum_.check)
        assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens


def test_the_page_suggests_what_it_can_do(server: Running) -> None:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.add_init_script("localStorage.setItem('microscale.settings', '{\"temperature\": 0}')")
        page.goto(server.address)
        page.screenshot(path=SCREENS / "demo-empty.png")
        expect(page.locator("#facts")).to_contain_text("A toy of 30 million parameters")
        page.get_by_text("What is the weather in").click()
        expect(page.locator("#badges")).to_have_text("get_weather, in this chat")
        call = page.locator(".turn.model .call")
        expect(call).to_contain_text("get_weather", timeout=30_000)
        expect(call).to_contain_text("Paris")
        page.screenshot(path=SCREENS / "demo-call.png")
