"""What ``run`` and ``chat`` have in common: their options, and the server that they talk to."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

from rich.markup import escape

from microscale.cli.chat_client import ChatServer, ServerError
from microscale.cli.console import err
from microscale.cli.help import (
    device_option,
    memory_option,
    model_option,
    network_option,
    precision_option,
    question_option,
    sampling_option,
)
from microscale.cli.options import check_device, choices
from microscale.errors import BadSetting
from microscale.models import embedded
from microscale.planning.option_values import PRECISION_NAMES

EFFORTS = ("low", "medium", "high")
USUAL_URL = "http://127.0.0.1:8000"
"""The default address of `microscale serve`."""
STOP_S = 15.0
"""How long a server that the chat started may take to stop."""
SERVING = re.compile(r"Serving\s.*?\sat\s+(http://\S+)", re.DOTALL)
BOUND = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a program that gets SIGTERM when its parent ends, however that happens (PR_SET_PDEATHSIG)."""
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""Characters that could control a terminal: all but line breaks and tabs."""

UrlOption = Annotated[
    str | None,
    network_option(metavar="URL", help=f"The server's address, such as {USUAL_URL}, with or without /v1."),
]
KeyOption = Annotated[str | None, network_option(metavar="KEY", help="The server's key. It is visible in `ps`.")]
KeyFileOption = Annotated[Path | None, network_option(help="A file with the key in its first line.")]
SystemOption = Annotated[str, question_option(help="The system prompt.")]
EffortOption = Annotated[str, question_option(**choices("--effort", EFFORTS), help="How long the model may think.")]
TemperatureOption = Annotated[
    float | None, sampling_option(help="0 is greedy. Default: the model's own.", min=0.0, max=2.0)
]
TopPOption = Annotated[
    float | None,
    sampling_option(
        help="Sample from the likeliest tokens that together have this probability. Default: the model's own.",
        min=0.0,
        max=1.0,
    ),
]
MaxTokensOption = Annotated[
    int | None, sampling_option(help="Maximum number of tokens in an answer. Default: what fits.", min=1)
]
SeedOption = Annotated[int | None, sampling_option(help="Seed for sampling. Default: random.", min=0)]
ServedLoadFormat = Annotated[
    str | None,
    model_option(
        **choices("--load-format", ("auto", "dummy")), help="For a MODEL: dummy makes random weights, without files."
    ),
]
ServedDevice = Annotated[
    str | None,
    device_option(metavar="auto|cpu|cuda|cuda:N", callback=check_device, help="For a MODEL: where it runs."),
]
ServedYes = Annotated[
    bool | None,
    device_option("--yes", help="For a MODEL: run it on the CPU even at less than half a token per second."),
]
ServedThreads = Annotated[int | None, device_option(help="For a MODEL: number of CPU threads.", min=1, max=1024)]
ServedPrecision = Annotated[
    str | None,
    precision_option(**choices("--precision", PRECISION_NAMES), help="For a MODEL: its precision. Default: exact."),
]
ServedLength = Annotated[
    int | None, memory_option(help="For a MODEL: maximum tokens of prompt and answer together.", min=1)
]


def clean(text: str) -> str:
    return text.translate(_CONTROL)


def without_none(**fields: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in fields.items() if value is not None}


def server_options(**given: Any) -> list[str]:
    """The options of a server to start, as `serve` takes them: ``max_model_len=4096`` is ``--max-model-len 4096``."""
    options: list[str] = []
    for name, value in without_none(**given).items():
        options += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return options


def end_on_signals() -> None:
    """SIGTERM and SIGHUP end the program as Ctrl-D does, which stops a server that was started for it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))


def find_server(url: str | None, model: str | None, options: list[str]) -> AbstractContextManager[str]:
    """The address of the server: ``--url``, a new server for a MODEL, or the one that already runs on port 8000."""
    if url is not None and (model is not None or options):
        given = "a MODEL" if model is not None else options[0]
        raise BadSetting(f"Use --url for a running server or {given} for a model to serve meanwhile, not both.")
    if url is None and model is None and not options and ChatServer(USUAL_URL).listens():
        url = USUAL_URL
    return nullcontext(url) if url is not None else started_server([model or embedded.NAME, *options])


@contextmanager
def started_server(options: list[str]) -> Iterator[str]:
    """Start a server, yield its address, and stop it at the end."""
    command = [sys.executable, "-c", BOUND, sys.executable, "-P", "-m", "microscale", "serve", *options, "--port", "0"]
    # A session of its own, so that Ctrl-C reaches the chat alone.
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    log: deque[str] = deque(maxlen=200)
    ready = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            log.append(line)
            if SERVING.search("".join(log)):
                ready.set()
        ready.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        with err.status("Starting the server") as status:
            while not ready.wait(0.1):
                if log:
                    status.update(f"Starting the server: {escape(clean(log[-1].strip())[:80])}")
        serving = SERVING.search("".join(log))
        if serving is None:
            reasons = [line.removeprefix("error: ").strip() for line in log if line.startswith("error: ")]
            raise ServerError(reasons[-1] if reasons else f"The server did not start.\n{''.join(log).strip()}")
        yield serving.group(1)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"--api-key-file {file} cannot be read: {error}.") from None
    if not key or not key.isascii() or not key.isprintable():
        raise BadSetting(f"--api-key-file {file} has no key in its first line.")
    return key
