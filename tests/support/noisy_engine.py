"""A server whose engine writes to standard error all the time while it loads. A factory, and runnable as a module."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from microscale.engine.config import EngineConfig
from microscale.engine.protocol.messages import Ready
from microscale.text.harmony import tokens as names

LAYERS = 12
KERNELS = 7


def load(config: EngineConfig, on_progress: Callable[..., None]) -> object:
    # Imported here, as a program is: the engine process runs this.
    from support.scripted_service import Scripted

    assert sys.stderr.isatty(), "libraries show their downloads in a terminal only"
    print("before the bar", file=sys.stderr, flush=True)
    for done in range(LAYERS + 1):
        on_progress(done, LAYERS)
        time.sleep(0.1)
        print(f"noise {done} of the engine", end="", file=sys.stderr, flush=True)
        time.sleep(0.05)
        print(" ends", file=sys.stderr, flush=True)
    on_progress(5, KERNELS, kernels=True)
    time.sleep(0.2)
    return Scripted([[1]], 0.001, 64, "scripted")


def main() -> int:
    from microscale.cli.console import err
    from microscale.cli.loading import engine_in_terminal
    from microscale.cli.serve import run_server as run
    from microscale.engine.client import launch as launching
    from microscale.engine.client.launch import EngineProcess
    from microscale.server.options import ServeOptions
    from support.tiny_tokenizers import tiny

    def on_ready(ready: Ready, address: str) -> None:
        end_loading()
        err.print(f"Serving at {address}")

    tokenizer = tiny()
    tokenizer.protect(names.NAMES)
    factory = ("--factory", "support.noisy_engine:load")
    launch = EngineProcess((*launching.COMMAND, *factory))
    if "ahead" in sys.argv:
        launching.COMMAND = launch.command
        launching.start_ahead()
    if "leaves" in sys.argv:
        with engine_in_terminal("Loading noise", launch):
            pass  # something is wrong, and nobody asks for the engine
        print(f"{threading.active_count() - 1} threads wait for it")
        return 0
    with engine_in_terminal("Loading noise", launch) as (wrapped, end_loading):
        assert wrapped.command == launch.command or "ahead" not in sys.argv, "it is running already"
        engine = EngineConfig("noisy", max_model_len=64)
        return run(ServeOptions(engine, tokenizer, ("noisy",), port=0, launch=wrapped, on_ready=on_ready))


if __name__ == "__main__":
    sys.exit(main())
