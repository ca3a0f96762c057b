"""Chat templates: the sandbox holds, and where a checkpoint's template comes from."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from microscale.errors import BadCheckpoint, BadRequest
from microscale.text import chat_template
from microscale.text.chat_template import ChatTemplate
from microscale.text.chatml import tokens as chatml_names
from microscale.text.chatml.format import ChatmlFormat
from microscale.text.conversation import Message, RenderOptions, Role, ToolCall
from microscale.text.formats import chat_format_for
from microscale.text.gemma.format import GemmaFormat
from microscale.text.harmony.format import HarmonyFormat
from microscale.text.template_format import lay_out
from microscale.text.tokenizer import Tokenizer
from support.tiny_chatml_text import TEMPLATE as CHATML_TEMPLATE
from support.tiny_chatml_text import XML_CALLS, inner_chatml, write_chatml_text
from support.tiny_gemma_text import TEMPLATE, write_gemma_text
from support.tiny_tokenizers import bare, tiny

GROW = "{%% set ns = namespace(s='aaaaaaaa') %%}{%% for i in range(40) %%}{%% set ns.s = %s %%}{%% endfor %%}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ 'a' * 1000000000 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ 2 ** 2 ** 2 }}",
        "{{ ('a' | replace('a', 'a')) | indent(1000000000) }}",
        GROW % "ns.s.replace('a', 'aa')",
        "{% set ns = namespace(s=['aaaaaaaa']) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        GROW % "ns.s.join([ns.s, ns.s])",
        GROW % "[ns.s, ns.s] | tojson",
        "{{ strftime_now('%1000000000d') }}",
        "{{ messages | pprint }}",
        "{% include 'x' %}",
        GROW % "ns.s + ns.s",
        GROW % "ns.s ~ ns.s",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ undefined_thing.x }}",
        "{{ raise_exception('no') }}",
    ],
)
def test_the_sandbox_holds(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends soon, as a refused request with one sentence: nothing is reached, and nothing grows."""
    monkeypatch.setattr(chat_template, "MAX_STEPS", 100_000)
    monkeypatch.setattr(chat_template, "MAX_CHARS", 1 << 20)
    begin = time.process_time()  # our own, whatever else the machine does
    with pytest.raises((BadRequest, BadCheckpoint)):
        ChatTemplate(source, "test").render([{"role": "user", "content": "x"}])
    assert time.process_time() - begin < 5


def test_the_clock_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TIMEOUT_S", 0.0)
    with pytest.raises(BadRequest, match="takes more than 0 s"):
        ChatTemplate("{% for i in range(5000) %}{% endfor %}", "test").render([])


def test_rendering_equals_that_of_transformers() -> None:
    """The same template with the same messages, in the library that it was written for."""
    messages = lay_out([Message(Role.SYSTEM, "Be brief."), Message(Role.USER, " Hi\n")], RenderOptions())
    tools = [{"type": "function", "function": {"name": "f", "description": "<b> & 'q'", "parameters": {"a": 1}}}]
    odd = TEMPLATE + "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    for source in (TEMPLATE, odd):
        values = {"tools": tools, "add_generation_prompt": True, "enable_thinking": True, "bos_token": "<bos>"}
        ours = ChatTemplate(source, "test").render(messages, **values)
        theirs, _ = render_jinja_template([messages], chat_template=source, **values)
        assert ours == theirs[0]


def test_the_tokenizer_decides_the_format(tmp_path: Path) -> None:
    def loaded() -> object:
        return chat_format_for(Tokenizer.load(folder))

    assert isinstance(chat_format_for(tiny()), HarmonyFormat)
    folder = write_gemma_text(tmp_path / "gemma")
    template, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    assert isinstance(loaded(), GemmaFormat)
    template.unlink()
    with pytest.raises(BadCheckpoint, match="no chat template"):
        loaded()
    config.write_text('{"chat_template": "{{ messages[0].content }}"}')
    assert isinstance(loaded(), GemmaFormat)
    config.write_text('{"chat_template": 3}')
    with pytest.raises(BadCheckpoint, match="'chat_template' must be a string"):
        loaded()
    template.write_text("{% if %}")
    with pytest.raises(BadCheckpoint, match=r"chat_template\.jinja is not a chat template"):
        loaded()
    template.write_text("x" * (chat_template.MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(BadCheckpoint, match="larger than"):
        loaded()
    folder = write_chatml_text(tmp_path / "chatml")
    assert isinstance(loaded(), ChatmlFormat)
    (folder / chat_template.FILE_NAME).unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML_TEMPLATE}))
    assert isinstance(loaded(), ChatmlFormat)
    # The template decides the style of calls, also another than the checkpoint's own.
    (tmp_path / "xml.jinja").write_text(XML_CALLS)
    call = Message(Role.ASSISTANT, tool_calls=(ToolCall("1", "f", "{}"),))
    for path, spelt in ((None, '{"name": "f"'), (tmp_path / "xml.jinja", "<function=f>")):
        chat_format = chat_format_for(Tokenizer.load(folder), path)
        assert spelt in chat_format.tokenizer.decode(chat_format.turn(call))
    # This format cannot use a tokenizer without marks for reasoning and calls.
    inner = bare(inner_chatml().model)
    inner.add_special_tokens([chatml_names.START, chatml_names.END])
    inner.save(str(folder / "tokenizer.json"))
    with pytest.raises(BadCheckpoint, match="no token '<think>', which this model's chat format needs"):
        loaded()
