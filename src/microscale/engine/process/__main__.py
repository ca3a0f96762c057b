"""The engine process: ``python -m microscale.engine.process --heartbeat M --fd N``.

Its owner (``client.EngineClient``) starts it with a heartbeat's page as file ``M`` and one end of a socket pair as file
``N``. It greets, loads, and then alternates between messages and ``step()`` until its owner goes, sends ``Drain``, or
SIGTERM comes. A thread imports torch while it greets, so that a wrong version or option shows at once.

Exit status: 0 drained, or the owner is gone; 1 the engine failed; 2 the owner sent nonsense.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from microscale.engine.config import EngineConfig
from microscale.engine.process.connection import Connection, OwnerGone, end_with_owner, watch_owner
from microscale.engine.process.loop import Loop
from microscale.engine.protocol.heartbeat import Heartbeat
from microscale.engine.protocol.messages import (
    VERSION,
    Failed,
    Hello,
    LoadEngine,
    Loading,
    check_hello,
    decode_for_engine,
)
from microscale.errors import BadMessage, MicroscaleError

if TYPE_CHECKING:
    from microscale.engine.process.service import Service

FACTORY = "microscale.engine.process.service:load"
LAST_WORD_S = 1.0
"""How long an engine that failed tries to send its error."""
log = logging.getLogger("microscale.engine.process")  # not __name__, which is __main__ here

Factory = Callable[[EngineConfig, Callable[[int, int], None]], "Service"]


def greet(connection: Connection) -> EngineConfig:
    """Exchange versions and return the options that the owner sends."""
    theirs = connection.next_frame()
    connection.send(Hello(VERSION))
    check_hello(theirs)
    message = decode_for_engine(connection.next_frame())
    if not isinstance(message, LoadEngine):
        raise BadMessage(f"The owner's second message must be LoadEngine and is {type(message).__name__}.")
    return message.config


def serve(connection: Connection, factory: str, heartbeat: Heartbeat) -> None:
    module, _, name = factory.partition(":")
    started = time.perf_counter()
    # The owner may have started this process before it has read its own options.
    threading.Thread(target=_import_ahead, args=(module,), daemon=True).start()
    config = greet(connection)
    known = time.perf_counter()
    load: Factory = getattr(importlib.import_module(module), name)
    # What was imported stays: the collector need not walk through it.
    gc.freeze()
    gc.enable()
    imported = time.perf_counter()
    seconds = known - started, imported - known
    log.info("The engine is about to load: options known %.2f s, imports %.2f s.", *seconds)

    def on_progress(done: int, total: int, *, kernels: bool = False) -> None:
        connection.send(Loading(done, total, kernels))

    service = load(config, on_progress)
    if service.team is not None:
        service.team.on_stuck(lambda error: end_at_once(connection, error))
    # A step must not wait for the collector to walk through what was loaded.
    gc.collect()
    gc.freeze()
    loop = Loop(service, connection, config.drain_s, heartbeat)
    # Only now: while it loads, SIGTERM ends the process as it ends any other.
    signal.signal(signal.SIGTERM, loop.on_sigterm)
    connection.send(service.ready)
    loop.run()


def end_at_once(connection: Connection, error: MicroscaleError) -> None:
    """End the process because another rank failed while this one waits for requests, or for that rank."""
    os._exit(fail(connection, error))


def _import_ahead(module: str) -> None:
    with contextlib.suppress(Exception):  # ``serve`` imports it again, and raises
        importlib.import_module(module)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="microscale.engine.process", description="Started by EngineClient.")
    parser.add_argument("--fd", type=int, required=True, help="The socket to the owner.")
    parser.add_argument("--heartbeat", type=int, required=True, help="The page that the owner reads.")
    parser.add_argument("--factory", default=FACTORY, help="What makes the engine, as module:function.")
    options = parser.parse_args(arguments)
    gc.disable()  # until the imports are over: hardly any of that is garbage
    logging.basicConfig(level=logging.WARNING, format="engine: %(message)s")
    logging.getLogger("microscale").setLevel(logging.INFO)
    end_with_owner()
    heartbeat = Heartbeat(options.heartbeat)
    heartbeat.close_file()
    threading.Thread(target=heartbeat.run, daemon=True).start()
    sock = socket.socket(fileno=options.fd)
    # A compiler that this process starts must not keep the socket open after it.
    sock.set_inheritable(False)
    threading.Thread(target=watch_owner, args=(sock,), daemon=True).start()
    connection = Connection(sock)
    try:
        serve(connection, options.factory, heartbeat)
    except OwnerGone:
        return 0
    except MicroscaleError as error:
        return fail(connection, error)
    except Exception as error:
        traceback.print_exc()
        return fail(connection, error)
    return 0


def fail(connection: Connection, error: Exception) -> int:
    """Send the error to the owner, which prints it; return the exit status. If the owner is gone, print it here."""
    if not isinstance(error, MicroscaleError):
        error = MicroscaleError(f"{type(error).__name__}: {error}")
    try:
        connection.send_last(Failed(error), LAST_WORD_S)
    except OwnerGone:
        log.error("%s", error)
    return 2 if isinstance(error, BadMessage) else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads and destructors of a device that has failed can hang, and the owner waits for the end.
    os._exit(status)
