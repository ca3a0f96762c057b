"""``microscale chat``: a conversation in the terminal, with a running server or one that it starts and stops."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.markup import escape
from rich.text import Text

from microscale.cli.chat_client import ChatAnswer, ChatServer, ServerError
from microscale.cli.console import err, out, print_error
from microscale.cli.help import (
    device_option,
    memory_option,
    model_option,
    network_option,
    precision_option,
    question_option,
    sampling_option,
)
from microscale.errors import BadSetting, MicroscaleError
from microscale.models import embedded

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
HELP = """\
[cyan]/effort low|medium|high[/]  how long the model may think
[cyan]/temperature 0..2[/]       how freely the model chooses its words; 0 is greedy
[cyan]/system \\[TEXT][/]          set the system prompt, or clear it
[cyan]/retry[/]                  answer the last question again
[cyan]/save FILE[/]              write the conversation: JSON if the name ends in .json, else Markdown
[cyan]/new[/]                    start a new conversation
[cyan]/quit[/]                   leave, as Ctrl-D does
Ctrl-C stops an answer. End a line with \\ to continue the message on the next one."""
_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})", re.MULTILINE)
_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
"""Characters that could control a terminal: all but line breaks and tabs."""


def clean(text: str) -> str:
    return text.translate(_CONTROL)


def split_finished(text: str) -> int:
    """Where the Markdown block that may still grow starts: after the last empty line outside of code."""
    at = text.rfind("\n\n")
    while at >= 0:
        if len(_FENCE.findall(text, 0, at)) % 2 == 0:
            return at + 2
        at = text.rfind("\n\n", 0, at)
    return 0


class AnswerView:
    """Shows an answer as it arrives: dim reasoning, then Markdown. Without a terminal, only the content, plain."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=12, transient=True) if console.is_terminal else None
        self._growing = ""
        self._is_content = False

    def add(self, reasoning: str, content: str) -> None:
        if self._live is None:
            self._console.print(clean(content), end="", soft_wrap=True, markup=False)
            return
        self._live.start()
        if content and not self._is_content:
            self._settle()
            self._is_content = True
        self._growing += clean(content if self._is_content else reasoning)
        at = split_finished(self._growing) if self._is_content else self._growing.rfind("\n") + 1
        if at:
            self._live.console.print(self._shown(self._growing[:at].rstrip("\n")))
            self._growing = self._growing[at:]
        self._live.update(self._shown(self._growing))

    def close(self) -> None:
        """Print the rest of the answer for good."""
        if self._live is None:
            self._console.print()
            return
        self._live.update(Text(""))
        self._live.stop()
        self._settle()

    def _settle(self) -> None:
        if self._growing:
            self._console.print(self._shown(self._growing))
        self._growing = ""

    def _shown(self, text: str) -> Markdown | Text:
        return Markdown(text) if self._is_content else Text(text, style="dim")


def summary(answer: ChatAnswer) -> str:
    """The line below an answer."""
    parts = ["[yellow]stopped[/]"] if answer.stopped else []
    if answer.finish == "length":
        parts.append("[yellow]cut off at the maximum number of tokens[/]")
    parts.append(f"{answer.num_tokens} tokens")
    if answer.rate is not None:
        parts.append(f"{answer.rate:.1f} tok/s")
    if answer.first_s is not None:
        parts.append(f"first after {answer.first_s * 1e3:.0f} ms")
    return f"[dim]{' · '.join(parts)}[/]"


class Conversation:
    """The messages so far, and the commands that act on them."""

    def __init__(self, server: ChatServer, fields: dict[str, Any], system: str, console: Console) -> None:
        self._server = server
        self._fields = fields
        self._system = system
        self._console = console
        self._messages: list[dict[str, str]] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda rest: console.print(HELP),
            "effort": self._set_effort,
            "temperature": self._set_temperature,
            "system": self._set_system,
            "retry": self._retry,
            "save": self._save,
            "new": self._new,
        }

    def handle(self, line: str) -> None:
        """Answer a question or run a command. After an error the conversation continues."""
        text = line.strip()
        name, _, rest = text[1:].partition(" ")
        try:
            if text.startswith("/") and name in self._commands:
                self._commands[name](rest.strip())
            elif text.startswith("/") and "\n" not in text:  # a paste may start with a path
                raise BadSetting(f"/{clean(name)[:40]} is not a command; /help lists them.")
            elif text:
                self._messages.append({"role": "user", "content": text})
                self._answer()
        except MicroscaleError as error:
            print_error(self._console, clean(str(error)))

    def _answer(self) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        answer, view = ChatAnswer(), AnswerView(self._console)
        try:
            with closing(self._server.chat({**self._fields, "messages": [*system, *self._messages]})) as chunks:
                for chunk in chunks:
                    view.add(*answer.take(chunk))
        except KeyboardInterrupt:
            answer.stopped = True
        except ServerError:
            if not answer.num_tokens:
                self._messages.pop()  # so that the user can repeat the question
                raise
            self._messages.append({"role": "assistant", "content": answer.content})
            raise
        finally:
            view.close()
        self._messages.append({"role": "assistant", "content": answer.content})
        self._console.print(summary(answer))

    def _set_effort(self, rest: str) -> None:
        if rest not in EFFORTS:
            raise BadSetting(f"The effort is {self._fields['reasoning_effort']}; it can be {', '.join(EFFORTS)}.")
        self._fields["reasoning_effort"] = rest
        self._console.print(f"[dim]effort: {rest}[/]")

    def _set_temperature(self, rest: str) -> None:
        try:
            value = float(rest)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 2:
            raise BadSetting(f"The temperature is {self._fields['temperature']:g}; it can be 0 to 2.")
        self._fields["temperature"] = value
        self._console.print(f"[dim]temperature: {value:g}[/]")

    def _set_system(self, rest: str) -> None:
        self._system = rest
        self._console.print(f"[dim]system prompt {'set' if rest else 'cleared'} from the next answer on[/]")

    def _retry(self, rest: str) -> None:
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if not self._messages:
            raise BadSetting("There is no question to answer again.")
        self._answer()

    def _save(self, rest: str) -> None:
        if not rest:
            raise BadSetting("Give a file name: /save FILE.")
        path = Path(rest).expanduser()
        messages = [{"role": "system", "content": self._system}] * bool(self._system) + self._messages
        text = "\n\n".join(f"## {message['role']}\n\n{message['content']}" for message in messages)
        if path.suffix == ".json":
            text = json.dumps({"messages": messages}, indent=2, ensure_ascii=False)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise BadSetting(f"{path} cannot be written: {error.strerror}.") from None
        self._console.print(f"[dim]saved to {escape(str(path))}[/]")

    def _new(self, rest: str) -> None:
        self._messages.clear()
        self._console.print("[dim]a new conversation[/]")


def read_message(console: Console) -> str:
    """One message. A line that ends with a backslash continues on the next. Raises EOFError after the last."""

    def read(text: str) -> str:
        # The marks tell readline which characters take no room on the screen.
        return input(f"\001\033[1;36m\002{text}\001\033[0m\002" if console.is_terminal and sys.stdin.isatty() else "")

    message = read("> ")
    while message.endswith("\\"):
        message = message[:-1] + "\n" + read("… ")
    return message


def converse(conversation: Conversation, console: Console) -> None:
    """Talk until the user leaves. Ctrl-C ends an answer or clears the line, and never ends the program."""
    with contextlib.suppress(ImportError):
        # Line editing and history. A paste of several lines is one message.
        importlib.import_module("readline").parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            message = read_message(console)
            if message.strip() == "/quit":
                return
            conversation.handle(message)
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D or /quit leaves.[/]")
        except EOFError:
            console.print()
            return


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
            raise ServerError(f"The server did not start.\n{''.join(log).strip()}")
        yield serving.group(1)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to serve during the chat. Default: the server on port 8000, or the embedded model."
        ),
    ] = None,
    url: Annotated[
        str | None, network_option(help=f"The server's address, such as {USUAL_URL}, with or without /v1.")
    ] = None,
    api_key: Annotated[str | None, network_option(help="The server's key. It is visible in `ps`.")] = None,
    api_key_file: Annotated[Path | None, network_option(help="A file with the key in its first line.")] = None,
    system: Annotated[str, question_option(help="The system prompt.")] = "",
    effort: Annotated[str, question_option(help="How long the model may think: low, medium or high.")] = "medium",
    temperature: Annotated[float, sampling_option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, sampling_option(help="Sample from the likeliest tokens that together have this probability.")
    ] = 1.0,
    max_tokens: Annotated[
        int | None, sampling_option(help="Maximum number of tokens in an answer. Default: what fits.", min=1)
    ] = None,
    seed: Annotated[int | None, sampling_option(help="Seed for sampling. Default: random.", min=0)] = None,
    load_format: Annotated[str | None, model_option(help="For a MODEL: auto, or dummy for random weights.")] = None,
    device: Annotated[str | None, device_option(help="For a MODEL: auto, cpu, cuda or cuda:N.")] = None,
    precision: Annotated[str | None, precision_option(help="For a MODEL: exact, balanced or fast.")] = None,
    max_model_len: Annotated[
        int | None, memory_option(help="For a MODEL: maximum tokens of prompt and answer together.", min=1)
    ] = None,
    threads: Annotated[int | None, device_option(help="For a MODEL: number of CPU threads.", min=1)] = None,
) -> None:
    """Chat with a model in the terminal. /help lists the commands."""
    if model is not None and (" " in model.strip() or model.endswith("?")) and not Path(model).exists():
        raise BadSetting(f"{model[:80]!r} is a question and not a MODEL; microscale run QUESTION answers it.")
    serving = {
        "--load-format": load_format, "--device": device, "--precision": precision, "--max-model-len": max_model_len,
        "--threads": threads,
    }  # fmt: skip
    running = find_server(url, model, [str(word) for pair in serving.items() if pair[1] is not None for word in pair])
    if effort not in EFFORTS:
        raise BadSetting(f"--effort {effort[:40]!r} is not one of {', '.join(EFFORTS)}.")
    fields: dict[str, Any] = {"reasoning_effort": effort, "temperature": temperature, "top_p": top_p}
    fields |= {name: value for name, value in (("max_tokens", max_tokens), ("seed", seed)) if value is not None}
    # End as Ctrl-D does, which stops a server that the chat started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    with running as address:
        server = ChatServer(address, api_key or read_key(api_key_file))
        with err.status(f"Asking {escape(server.url)}"):
            name, length = server.model()
        room = "" if length is None else f", {length} tokens"
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until ``converse`` can take it
        out.print(f"[bold]{escape(clean(name))}[/][dim]{room}. /help lists commands, Ctrl-D leaves.[/]")
        if name == embedded.SERVED_NAME:
            out.print(f"[dim]This is {embedded.ABOUT}.[/]")
        converse(Conversation(server, fields, system, out), out)


def find_server(url: str | None, model: str | None, options: list[str]) -> AbstractContextManager[str]:
    """The address of the server: ``--url``, a new server for a MODEL, or the one that already runs on port 8000."""
    if url is not None and (model is not None or options):
        given = "a MODEL" if model is not None else options[0]
        raise BadSetting(f"Use --url for a running server or {given} for a model to serve meanwhile, not both.")
    if url is None and model is None and not options and ChatServer(USUAL_URL).listens():
        url = USUAL_URL
    return nullcontext(url) if url is not None else started_server([model or embedded.NAME, *options])


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
