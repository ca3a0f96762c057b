"""``microscale chat``: a conversation in the terminal, with a running server or one that it starts and stops."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import signal
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.markup import escape
from rich.text import Text

from microscale.cli.asking import (
    EFFORTS,
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
from microscale.cli.chat_client import ChatAnswer, ChatServer, ServerError
from microscale.cli.console import err, out, print_error
from microscale.errors import BadSetting, MicroscaleError
from microscale.models import embedded

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
            current = self._fields.get("temperature")
            known = "the model's own" if current is None else f"{current:g}"
            raise BadSetting(f"The temperature is {known}; it can be 0 to 2.")
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


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model to serve during the chat. Default: the server on port 8000, or the embedded model."
        ),
    ] = None,
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
    """Chat with a model in the terminal. /help lists the commands."""
    if model is not None and (" " in model.strip() or model.endswith("?")) and not Path(model).exists():
        raise BadSetting(f"{model[:80]!r} is a question and not a MODEL; microscale run QUESTION answers it.")
    options = server_options(
        load_format=load_format,
        device=device,
        yes=yes,
        precision=precision,
        max_model_len=max_model_len,
        threads=threads,
    )
    running = find_server(url, model, options)
    fields: dict[str, Any] = {"reasoning_effort": effort}
    fields |= without_none(temperature=temperature, top_p=top_p, max_tokens=max_tokens, seed=seed)
    end_on_signals()
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
