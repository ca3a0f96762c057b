"""``microscale chat``: a conversation in the terminal, with a server that runs or with one that it starts and stops."""

from __future__ import annotations

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
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from microscale.cli.chat_client import Answer, Server, ServerError
from microscale.cli.chat_input import Entry
from microscale.cli.chat_screen import AnswerView, clean, summary
from microscale.cli.console import err, out, print_error
from microscale.errors import BadSetting, MicroscaleError
from microscale.models import embedded

EFFORTS = ("low", "medium", "high")
USUAL_URL = "http://127.0.0.1:8000"
"""Where `microscale serve` is found unless it was told otherwise."""
STOP_S = 15.0
"""How long a server that was started here may take to stop."""
SERVING = re.compile(r"Serving\s.*?\sat\s+(http://\S+)", re.DOTALL)
BOUND = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Starts a program that gets SIGTERM when whoever started it is gone, however (PR_SET_PDEATHSIG)."""
HELP = {
    "/help": "this list",
    "several lines": "paste them, or end a line with \\ and go on; Enter sends them as one message",
    "/effort low|medium|high": "how long the model may think",
    "/system [TEXT]": "set the system prompt, or clear it",
    "/retry": "answer the last question again",
    "/fold": "fold thoughts into a line, or show them",
    "/thoughts": "the thoughts behind the last answer",
    "/stats": "figures of this conversation and of the server",
    "/save FILE": "write the conversation, as JSON if the name ends so, else as Markdown",
    "/new": "begin anew",
    "/quit": "leave; so does Ctrl-D. Ctrl-C stops an answer.",
}


class Leave(Exception):
    """The user is done."""


class Conversation:
    """What was said, and the commands that act on it."""

    def __init__(self, server: Server, fields: dict[str, Any], system: str, console: Console) -> None:
        self._server = server
        self._fields = fields
        self._system = system
        self._console = console
        self._messages: list[dict[str, Any]] = []
        self._answers: list[Answer] = []
        self._fold = False
        self._commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "effort": self._effort,
            "system": self._set_system,
            "retry": self._retry,
            "fold": self._toggle_fold,
            "thoughts": self._thoughts,
            "stats": self._stats,
            "save": self._save,
            "new": self._new,
            "quit": self._quit,
        }

    def handle(self, line: str) -> None:
        """A question, or a command. What goes wrong is told, and the conversation goes on."""
        text = line.strip()
        if not text:
            return
        try:
            words = text[1:].split(maxsplit=1) if text.startswith("/") else []
            if words and words[0] in self._commands:
                self._commands[words[0]](words[1] if len(words) > 1 else "")
            elif text.startswith("/") and "\n" not in text:  # a paste may begin with a path
                raise BadSetting(f"/{clean(text[1:].partition(' ')[0])[:40]} is no command; /help lists them.")
            else:
                self._messages.append({"role": "user", "content": text})
                self._answer()
        except MicroscaleError as error:
            print_error(self._console, clean(str(error)))

    def _answer(self) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {**self._fields, "messages": [*system, *self._messages]}
        answer = Answer()
        try:
            with closing(self._server.chat(body)) as chunks, AnswerView(self._console, fold=self._fold) as view:
                try:
                    for chunk in chunks:
                        view.add(*answer.take(chunk), answer)
                except KeyboardInterrupt:
                    answer.stopped = True
        except KeyboardInterrupt:  # before the first token
            answer.stopped = True
        except ServerError:
            if not answer.num_tokens:
                self._messages.pop()  # it can be asked again as if it had not been
                raise
            self._keep(answer)
            raise
        self._keep(answer)
        for call in answer.calls:
            self._console.print(Text(f"calls {clean(call['name'])}({clean(call['arguments'])})", style="magenta"))
        self._console.print(summary(answer))

    def _keep(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._messages.append({"role": "assistant", "content": answer.content})

    # ---- commands ----------------------------------------------------------------------------------------------------

    def _help(self, rest: str) -> None:
        table = Table.grid(padding=(0, 2))
        for name, text in HELP.items():
            table.add_row(Text(name, style="cyan"), text)
        self._console.print(table)

    def _effort(self, rest: str) -> None:
        if rest not in EFFORTS:
            raise BadSetting(f"The effort is {self._fields['reasoning_effort']}; it can be {', '.join(EFFORTS)}.")
        self._fields["reasoning_effort"] = rest
        self._console.print(f"[dim]effort: {rest}[/]")

    def _set_system(self, rest: str) -> None:
        self._system = rest
        self._console.print(f"[dim]system prompt {'set' if rest else 'cleared'}; it holds from the next answer on[/]")

    def _retry(self, rest: str) -> None:
        if self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if not self._messages:
            raise BadSetting("There is no question to answer again.")
        self._answer()

    def _toggle_fold(self, rest: str) -> None:
        self._fold = not self._fold
        self._console.print(f"[dim]thoughts are {'folded' if self._fold else 'shown'}[/]")

    def _thoughts(self, rest: str) -> None:
        if not self._answers or not self._answers[-1].reasoning:
            raise BadSetting("The last answer has no thoughts behind it.")
        self._console.print(Text(clean(self._answers[-1].reasoning), style="dim"))

    def _stats(self, rest: str) -> None:
        table = Table.grid(padding=(0, 2))
        rates = [answer.rate for answer in self._answers if answer.rate is not None]
        firsts = [answer.first_s for answer in self._answers if answer.first_s is not None]
        rows = {"answers": str(len(self._answers)), "tokens": str(sum(a.num_tokens for a in self._answers))}
        if rates:
            rows["tok/s"] = f"{rates[-1]:.1f} last, {sum(rates) / len(rates):.1f} mean"
        if firsts:
            rows["first token"] = f"{firsts[-1] * 1e3:.0f} ms last, {sum(firsts) / len(firsts) * 1e3:.0f} ms mean"
        said = self._server.metrics()
        if "num_requests_running" in said:
            rows["server"] = (
                f"{said['num_requests_running']:.0f} running, {said['num_requests_waiting']:.0f} waiting, "
                f"KV cache {100 * said['kv_cache_usage_perc']:.1f} % in use"
            )
        for name, value in rows.items():
            table.add_row(Text(name, style="cyan"), value)
        self._console.print(table)

    def _save(self, rest: str) -> None:
        if not rest:
            raise BadSetting("Say where: /save FILE.")
        path = Path(rest).expanduser()
        if path.suffix == ".json":
            text = json.dumps({"system": self._system, "messages": self._messages}, indent=2, ensure_ascii=False)
        else:
            said = [("system", self._system)] if self._system else []
            said += [(message["role"], message["content"]) for message in self._messages]
            text = "\n\n".join(f"## {role}\n\n{content}" for role, content in said)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            raise BadSetting(f"{path} is there already; choose another name.") from None
        except OSError as error:
            raise BadSetting(f"{path} cannot be written: {error.strerror}.") from None
        self._console.print(f"[dim]saved to {escape(str(path))}[/]")

    def _new(self, rest: str) -> None:
        self._messages.clear()
        self._answers.clear()
        self._console.print("[dim]a new conversation[/]")

    def _quit(self, rest: str) -> NoReturn:
        raise Leave


def converse(conversation: Conversation, console: Console) -> None:
    """Until the user leaves. Ctrl-C ends an answer or empties the line, whenever it comes, and never the program."""
    entry = Entry(console)
    while True:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            conversation.handle(entry.read())
        except KeyboardInterrupt:
            console.print("\n[dim]Ctrl-D or /quit leaves.[/]")
        except EOFError:
            console.print()
            return
        except Leave:
            return


@contextmanager
def started_server(options: list[str]) -> Iterator[str]:
    """A server of our own, while it is needed; its address."""
    command = [sys.executable, "-c", BOUND, sys.executable, "-P", "-m", "microscale", "serve", *options, "--port", "0"]
    # A session of its own: Ctrl-C is for the chat.
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    said: deque[str] = deque(maxlen=200)
    ready = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            if SERVING.search("".join(said)):
                ready.set()
        ready.set()

    threading.Thread(target=listen, daemon=True).start()
    try:
        with err.status("Starting the server") as status:
            while not ready.wait(0.1):
                if said:
                    status.update(f"Starting the server: {escape(clean(said[-1].strip())[:80])}")
        found = SERVING.search("".join(said))
        if found is None:
            raise ServerError(f"The server did not start.\n{''.join(said).strip()}")
        yield found.group(1)
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
        typer.Argument(help="A model to serve meanwhile; without it the server that runs here, or the embedded model."),
    ] = None,
    url: Annotated[str | None, typer.Option(help=f"The server's address, such as {USUAL_URL}; /v1 may follow.")] = None,
    api_key: Annotated[str | None, typer.Option(help="The server's key. Others can see it in `ps`.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="A file with the key in its first line.")] = None,
    system: Annotated[str, typer.Option(help="The system prompt.")] = "",
    effort: Annotated[str, typer.Option(help="How long the model may think: low, medium or high.")] = "medium",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens that together have this probability.")] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens of an answer; what fits without.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling; random without.", min=0)] = None,
    load_format: Annotated[str | None, typer.Option(help="Of a model served meanwhile: dummy, auto.")] = None,
    device: Annotated[str | None, typer.Option(help="Of a model served meanwhile: auto, cpu, cuda or cuda:N.")] = None,
    precision: Annotated[str | None, typer.Option(help="Of a model served meanwhile: exact, balanced, fast.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Of a model served meanwhile: most tokens.", min=1)] = None,
    threads: Annotated[int | None, typer.Option(help="Of a model served meanwhile: CPU threads.", min=1)] = None,
) -> None:
    """Chat with a model in the terminal. /help lists what can be said beside questions."""
    serving = {
        "--load-format": load_format, "--device": device, "--precision": precision, "--max-model-len": max_model_len,
        "--threads": threads,
    }  # fmt: skip
    running = find_server(url, model, [str(word) for pair in serving.items() if pair[1] is not None for word in pair])
    if effort not in EFFORTS:
        raise BadSetting(f"--effort {effort[:40]!r} is not one of {', '.join(EFFORTS)}.")
    fields: dict[str, Any] = {"reasoning_effort": effort, "temperature": temperature, "top_p": top_p}
    fields |= {name: value for name, value in (("max_tokens", max_tokens), ("seed", seed)) if value is not None}
    # Ends as Ctrl-D does: a server that was started here is stopped.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    with running as address:
        server = Server(address, api_key or _read_key(api_key_file))
        with err.status(f"Asking {escape(server.url)}"):
            name, length = server.model()
        room = "" if length is None else f", {length} tokens"
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until ``converse`` can take it
        out.print(f"[bold]{escape(clean(name))}[/][dim]{room}. /help lists commands, Ctrl-D leaves.[/]")
        if name == embedded.SERVED_NAME:
            out.print(f"[dim]This is {embedded.ABOUT}.[/]")
        converse(Conversation(server, fields, system, out), out)


def find_server(url: str | None, model: str | None, options: list[str]) -> AbstractContextManager[str]:
    """The address of the server to talk to: the one named, one of our own, or else the one that runs here already."""
    if url is not None and (model is not None or options):
        given = "a MODEL" if model is not None else options[0]
        raise BadSetting(f"Give the --url of a server or {given} for a model to serve meanwhile, not both.")
    if url is None and model is None and not options and Server(USUAL_URL).listens():
        url = USUAL_URL
    return nullcontext(url) if url is not None else started_server([model or embedded.NAME, *options])


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        key = file.read_text().partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"--api-key-file {file} cannot be read: {error}.") from None
    if not key or not key.isascii() or not key.isprintable():
        raise BadSetting(f"--api-key-file {file} holds no key in its first line.")
    return key
