"""``microscale run``: one question, one answer as plain text, for scripts and pipes."""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from typing import Annotated, Any

import typer

from microscale.cli.asking import (
    EffortOption,
    KeyFileOption,
    KeyOption,
    MaxTokensOption,
    SeedOption,
    ServedDevice,
    ServedLength,
    ServedLoadFormat,
    ServedPrecision,
    ServedThreads,
    ServedYes,
    SystemOption,
    TemperatureOption,
    TopPOption,
    UrlOption,
    clean,
    end_on_signals,
    find_server,
    read_key,
    server_options,
    without_none,
)
from microscale.cli.chat_client import ChatAnswer, ChatServer
from microscale.cli.console import err
from microscale.errors import BadSetting


def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] QUESTION",
            help="The question in quotes, or - to read it from standard input. Default MODEL: the server on port 8000, "
            "or the embedded model.",
        ),
    ],
    url: UrlOption = None,
    api_key: KeyOption = None,
    api_key_file: KeyFileOption = None,
    system: SystemOption = "",
    effort: EffortOption = "medium",
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    max_tokens: MaxTokensOption = None,
    seed: SeedOption = None,
    load_format: ServedLoadFormat = None,
    device: ServedDevice = None,
    yes: ServedYes = None,
    precision: ServedPrecision = None,
    max_model_len: ServedLength = None,
    threads: ServedThreads = None,
) -> None:
    """Answer one question and exit. The answer is streamed to standard output as plain text, without reasoning."""
    *models, question = words
    if len(models) > 1:
        raise BadSetting('Put the question in quotes: microscale run "What is 2 + 2?"')
    if question == "-":
        question = sys.stdin.read()
    if not question.strip():
        raise BadSetting("The question is empty.")
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    fields: dict[str, Any] = {"messages": messages, "reasoning_effort": effort}
    fields |= without_none(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    options = server_options(
        load_format=load_format,
        device=device,
        yes=yes,
        precision=precision,
        max_model_len=max_model_len,
        threads=threads,
    )
    end_on_signals()
    with find_server(url, models[0] if models else None, options) as address:
        server = ChatServer(address, api_key or read_key(api_key_file))
        answer = ChatAnswer()
        with closing(server.chat(fields)) as chunks:
            for chunk in chunks:
                _, content = answer.take(chunk)
                _write(clean(content))
        _write("\n")
    if answer.finish == "length":
        err.print("[yellow]The answer was cut off at the maximum number of tokens.[/]")


def _write(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as in `| head -1`
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        sys.exit(0)
