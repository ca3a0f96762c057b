"""``microscale run``: one question, one answer as plain text, for scripts and pipes."""

from __future__ import annotations

import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from microscale.cli.chat import EFFORTS, USUAL_URL, clean, find_server, read_key
from microscale.cli.chat_client import ChatAnswer, ChatServer
from microscale.cli.console import err
from microscale.cli.help import (
    device_option,
    model_option,
    network_option,
    precision_option,
    question_option,
    sampling_option,
)
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
    url: Annotated[
        str | None, network_option(help=f"The server's address, such as {USUAL_URL}, with or without /v1.")
    ] = None,
    api_key: Annotated[str | None, network_option(help="The server's key. It is visible in `ps`.")] = None,
    api_key_file: Annotated[Path | None, network_option(help="A file with the key in its first line.")] = None,
    system: Annotated[str, question_option(help="The system prompt.")] = "",
    effort: Annotated[str, question_option(help="How long the model may think: low, medium or high.")] = "medium",
    temperature: Annotated[float, sampling_option(help="0 is greedy.", min=0.0, max=2.0)] = 1.0,
    max_tokens: Annotated[
        int | None, sampling_option(help="Maximum number of tokens in the answer. Default: what fits.", min=1)
    ] = None,
    seed: Annotated[int | None, sampling_option(help="Seed for sampling. Default: random.", min=0)] = None,
    load_format: Annotated[str | None, model_option(help="For a MODEL: auto, or dummy for random weights.")] = None,
    device: Annotated[str | None, device_option(help="For a MODEL: auto, cpu, cuda or cuda:N.")] = None,
    precision: Annotated[str | None, precision_option(help="For a MODEL: exact, balanced or fast.")] = None,
) -> None:
    """Answer one question and exit. The answer is streamed to standard output as plain text, without reasoning."""
    *models, question = words
    if len(models) > 1:
        raise BadSetting('Put the question in quotes: microscale run "What is 2 + 2?"')
    if effort not in EFFORTS:
        raise BadSetting(f"--effort {effort[:40]!r} is not one of {', '.join(EFFORTS)}.")
    if question == "-":
        question = sys.stdin.read()
    if not question.strip():
        raise BadSetting("The question is empty.")
    messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": question}]
    fields: dict[str, Any] = {"messages": messages, "reasoning_effort": effort, "temperature": temperature}
    fields |= {name: value for name, value in (("max_tokens", max_tokens), ("seed", seed)) if value is not None}
    serving = {"--load-format": load_format, "--device": device, "--precision": precision}
    options = [str(word) for pair in serving.items() if pair[1] is not None for word in pair]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # stops a server that was started for this
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
