"""A tokenizer of bytes with ChatML's control tokens as Qwen 3's has them, and chat templates in that format."""

from __future__ import annotations

import functools
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from microscale.text.chat_template import FILE_NAME
from microscale.text.chatml import tokens as names
from microscale.text.tokenizer import Tokenizer
from support.tiny_tokenizers import SENTENCES, bare

SPECIAL = [names.END_OF_TEXT, names.START, names.END, "<|vision_start|>"]
ADDED = [name for name in names.NAMES if name not in SPECIAL] + ["<|fim_prefix|>"]
"""Not marked as special, in these tokenizers."""

# Ours, in the format of Qwen's own: tools in the system's turn, thoughts kept since the last question, results in a
# user's turn, an empty thought where none is wished for.
_TALK = """
{%- macro turn(role) -%}{{ '<|im_start|>' ~ role ~ '\\n' ~ caller() ~ '<|im_end|>\\n' }}{%- endmacro -%}
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' -%}
{%- if system or tools -%}
    {%- call turn('system') -%}
        {{ system }}
        {%- if tools -%}
            {{ '\\n\\n' if system }}Functions, as JSON:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor -%}
</tools>
HOW_TO_CALL
        {%- endif -%}
    {%- endcall -%}
{%- endif -%}
{%- set last = namespace(question=-1) -%}
{%- for message in messages if message['role'] == 'user' -%}
    {%- set last.question = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages[1 if system else 0:] -%}
    {%- set role = message['role'] -%}
    {%- if role == 'tool' -%}
        {{ '<|im_start|>user' if loop.previtem is not defined or loop.previtem['role'] != 'tool' }}
        {{- '\\n<tool_response>\\n' ~ message['content'] ~ '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem['role'] != 'tool' }}
    {%- elif role == 'assistant' -%}
        {%- call turn(role) -%}
            {%- if message['reasoning_content'] and (preserve_thinking or messages.index(message) > last.question) -%}
                {{ '<think>\\n' ~ message['reasoning_content'] ~ '\\n</think>\\n\\n' }}
            {%- endif -%}
            {{ message['content'] }}
            {%- for call in message['tool_calls'] or [] -%}
                {{ '\\n' if message['content'] or not loop.first }}
                {{- '<tool_call>\\n' -}}
                CALL
                {{- '\\n</tool_call>' }}
            {%- endfor -%}
        {%- endcall -%}
    {%- elif role in ('user', 'system') -%}
        {%- call turn(role) -%}{{ message['content'] }}{%- endcall -%}
    {%- else -%}
        {{ raise_exception('no role ' ~ role) }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}"""
_JSON = _TALK.replace(
    "HOW_TO_CALL", "A call is an object with name and arguments, between {{ '<tool_call>' }} and {{ '</tool_call>' }}."
).replace(
    "CALL",
    """{{ '{"name": "' ~ call['function']['name'] ~ '", "arguments": ' }}
                {{- call['function']['arguments'] | tojson ~ '}' }}""",
)
_XML = _TALK.replace(
    "HOW_TO_CALL",
    """A call looks like this:
{{ '<tool_call>\\n<function=name>\\n<parameter=name>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}""",
).replace(
    "CALL",
    """{{ '<function=' ~ call['function']['name'] ~ '>\\n' }}
                {%- for name, value in call['function']['arguments'] | items -%}
                    {%- set text = value if value is string else value | tojson -%}
                    {{ '<parameter=' ~ name ~ '>\\n' ~ text ~ '\\n</parameter>\\n' }}
                {%- endfor -%}
                {{ '</function>' }}""",
)
_NO_THOUGHT = "{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false "
TEMPLATE = _JSON + _NO_THOUGHT + "}}{%- endif -%}"
ALWAYS_THINKS = _JSON + "{{ '<think>\\n' }}{%- endif -%}"
"""The prompt itself begins the thoughts."""
XML_CALLS = _XML + _NO_THOUGHT + "else '<think>\\n' }}{%- endif -%}"
"""In the style of Qwen 3.5 and 3.6: calls are XML, and the prompt begins the thoughts unless none is wanted."""


def inner_chatml(vocab_size: int = 500) -> tokenizers.Tokenizer:
    """About ``vocab_size`` tokens and, as the last ids, the control tokens."""
    inner = bare(models.BPE())
    inner.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    calls = ['{"name": "f", "arguments": {"a": 1}}\n', "}}\n", "\n\n", ".\n", ".\n\n"]
    inner.train_from_iterator([*SENTENCES, *calls], trainer)
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    inner.add_tokens([AddedToken(name, special=False, normalized=False) for name in ADDED])
    return inner


def write_chatml_text(folder: Path, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    inner_chatml().save(str(folder / "tokenizer.json"))
    (folder / FILE_NAME).write_text(template)
    return folder


@functools.cache
def tiny_chatml() -> Tokenizer:
    """Its marks are control tokens, as the format makes them."""
    tokenizer = Tokenizer(inner_chatml(), "tiny chatml tokenizer.json")
    tokenizer.protect(names.NAMES)
    return tokenizer
