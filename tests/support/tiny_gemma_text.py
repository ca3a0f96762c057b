"""A tokenizer of pieces with Gemma 4's control tokens at ids of its own, and a chat template in Gemma 4's format."""

from __future__ import annotations

import functools
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

from microscale.text.chat_template import FILE_NAME
from microscale.text.gemma import tokens as names
from microscale.text.tokenizer import SPACE, Tokenizer

OTHERS = ["<|tool>", "<tool|>", "<tool_response|>", "<|think|>", "<|image|>", "[multimodal]"]

# Ours, in the format of Gemma 4's own: system turn with tools, thoughts kept while tools are called, results within the
# model's turn, an empty thought where none is wished for.
TEMPLATE = """
{%- macro value(v) -%}
    {%- if v is string -%}<|"|>{{ v }}<|"|>
    {%- elif v is boolean -%}{{ 'true' if v else 'false' }}
    {%- elif v is mapping -%}{
        {%- for key, inner in v | dictsort -%}{{ key }}:{{ value(inner) }}{{ ',' if not loop.last }}{%- endfor -%} }
    {%- elif v is iterable -%}[
        {%- for inner in v -%}{{ value(inner) }}{{ ',' if not loop.last }}{%- endfor -%} ]
    {%- else -%}{{ v }}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- set rest = messages -%}
{%- if enable_thinking or tools or messages[0]['role'] == 'system' -%}
    {{ '<|turn>system\n' }}
    {%- if enable_thinking %}{{ '<|think|>\n' }}{% endif -%}
    {%- if messages[0]['role'] == 'system' -%}
        {{ messages[0]['content'] | trim }}
        {%- set rest = messages[1:] -%}
    {%- endif -%}
    {%- for tool in tools or [] -%}
        <|tool>declaration:{{ tool['function']['name'] }}{{ value(tool['function']['parameters']) }}<tool|>
    {%- endfor -%}
    {{ '<turn|>\n' }}
{%- endif -%}
{%- set ns = namespace(open=false) -%}
{%- for message in rest -%}
    {%- if message['role'] == 'tool' -%}
        <|tool_response>response:{{ message['name'] }}{value:{{ value(message['content']) }}}<tool_response|>
    {%- else -%}
        {%- if message['role'] not in ('user', 'assistant', 'system') -%}
            {{ raise_exception('no role ' + message['role']) }}
        {%- endif -%}
        {%- if not ns.open -%}
            {{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
        {%- endif -%}
        {%- if message.get('reasoning') and message.get('tool_calls') -%}
            {{ '<|channel>thought\n' + message['reasoning'] + '\n<channel|>' }}
        {%- endif -%}
        {{ message['content'] | trim }}
        {%- for call in message.get('tool_calls') or [] -%}
            <|tool_call>call:{{ call['function']['name'] }}{{ value(call['function']['arguments']) }}<tool_call|>
        {%- endfor -%}
        {%- set ns.open = message.get('tool_calls') is not none and message.get('tool_calls') is defined -%}
        {%- if not ns.open %}{{ '<turn|>\n' }}{% endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and not ns.open -%}
    {{ '<|turn>model\n' }}
    {%- if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif -%}
{%- endif -%}
"""


def inner_gemma() -> tokenizers.Tokenizer:
    """Printable ASCII, a few pieces with their merges, 256 bytes. Control tokens lie at both ends of the ids."""
    first = ["<pad>", names.EOS, names.BOS, "<unk>", names.QUOTE, names.END_TURN]
    chars = [chr(n) for n in range(33, 127)] + ["\n", SPACE]
    merges = [
        ("h", "e"),
        ("t", "h"),
        ("w", "o"),
        ("wo", "r"),
        ("l", "d"),
        ("wor", "ld"),
        (SPACE, "t"),
        (SPACE + "t", "he"),
    ]
    pieces = [*chars, *(a + b for a, b in merges)]
    vocabulary = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(pieces)]
    model = models.BPE(
        vocab={piece: number for number, piece in enumerate(vocabulary)},
        merges=merges,
        byte_fallback=True,
        unk_token="<unk>",
    )
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", SPACE)
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    last = [names.TURN, names.CHANNEL, names.END_CHANNEL, names.CALL, names.END_CALL, names.RESPONSE, *OTHERS]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*first, *last)])
    inner.add_tokens([AddedToken("\n\n", special=False, normalized=False)])
    return inner


def write_gemma_text(folder: Path, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    inner_gemma().save(str(folder / "tokenizer.json"))
    (folder / FILE_NAME).write_text(template)
    return folder


@functools.cache
def tiny_gemma() -> Tokenizer:
    return Tokenizer(inner_gemma(), "tiny gemma tokenizer.json")
