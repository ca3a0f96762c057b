"""The engine process's loop: messages and steps by turns."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from microscale.engine.output import Output
from microscale.engine.process.connection import Connection
from microscale.engine.protocol.heartbeat import Heartbeat
from microscale.engine.protocol.messages import (
    MAX_OUTPUTS,
    Abort,
    Accepted,
    Drain,
    Drained,
    GetStats,
    LoadEngine,
    Refused,
    StatsReply,
    Submit,
    ToEngine,
    Tokens,
)
from microscale.errors import BadMessage, Draining, MicroscaleError

if TYPE_CHECKING:
    from microscale.engine.process.service import Service

QUIET_S = 0.5
"""The engine prepares ahead only after this long without a message, so that requests that follow one another find it
waiting for them."""
PREPARING_S = 60.0
"""How long one piece of work ahead may take, such as capturing a graph."""
COMPILING_S = 600.0
"""How long a step may take in which a kernel turns out not to be compiled."""


class Loop:
    """Messages and steps by turns, until there is nothing left to wait for."""

    def __init__(self, service: Service, connection: Connection, drain_s: float, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        service.before_compiling(lambda: heartbeat.begin(COMPILING_S))
        self._service = service
        self._connection = connection
        self._drain_s = drain_s
        self._deadline: float | None = None
        """When draining ends; ``None`` while it has not begun."""

    def run(self) -> None:
        service = self._service
        more, quiet = True, False
        while True:
            # One that drains and has no work left is done: it waits for nothing.
            wait_s: float | None = 0
            if not service.has_work and self._deadline is None and not (more and quiet):
                wait_s = QUIET_S if more else None
            messages = self._connection.messages(wait_s)
            quiet = not messages and not service.has_work
            for message in messages:
                self._handle(message)
            if self._deadline is not None and (not service.has_work or time.monotonic() >= self._deadline):
                break
            if service.has_work:
                self._heartbeat.begin(service.step_limit_s)
                outputs = service.step()
                self._heartbeat.end()
                self._send(outputs)
                more = True
            elif more and quiet:
                self._heartbeat.begin(PREPARING_S)
                more = service.idle()
                self._heartbeat.end()
        rest = service.abort_all()
        self._send(rest)
        self._connection.send_last(Drained(len(rest)))

    def drain(self, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def on_sigterm(self, signum: int, stack: object) -> None:
        self.drain(self._drain_s)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._connection.send(self._submit(message))
            case Abort(request_id):
                self._service.abort(request_id)
            case GetStats():
                self._connection.send(StatsReply(self._service.stats()))
            case Drain(deadline_s):
                self.drain(deadline_s)
            case LoadEngine():
                raise BadMessage("The engine is loaded already; a second one needs a process of its own.")

    def _submit(self, message: Submit) -> Accepted | Refused:
        try:
            if self._deadline is not None:
                raise Draining("The engine is about to stop and takes no new requests.")
            self._service.submit(message)
        except MicroscaleError as error:
            return Refused(message.request_id, error)
        return Accepted(message.request_id)

    def _send(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.prompt_logprobs:
                self._connection.send(Tokens((output,)))
        others = [output for output in outputs if not output.prompt_logprobs]
        # A step without outputs is reported too: the owner sees that the engine is alive.
        for first in range(0, max(len(others), 1), MAX_OUTPUTS):
            self._connection.send(Tokens(tuple(others[first : first + MAX_OUTPUTS])))
