"""A real server in a process of its own over ``scripted_service``: started by tests, and runnable as a module."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from microscale.text.harmony import tokens as names
from microscale.text.tokenizer import Tokenizer
from support.ending import end

TESTS = Path(__file__).parents[1]
KEY = "sk-test"
MODEL = "scripted"

TURNS = {
    "answer": "<|channel|>analysis<|message|>Let me think: naïve 👩‍👧.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The answer is 4. 日本<|return|>",
    "call": "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
    "no header": "Just text.<|return|>",
    "only thoughts": "<|channel|>analysis<|message|>Hm.<|return|>",
    "plain": "one two STOP three<|endoftext|>",
}
SEEDS = {name: seed for seed, name in enumerate(TURNS)}


def scripts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode_with_control(turn) for turn in TURNS.values()]


@dataclass(frozen=True)
class Live:
    address: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def v1(self) -> str:
        return f"{self.address}/v1"

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)


@contextmanager
def command(arguments: Sequence[str], log: Path, under: Sequence[str] = ()) -> Iterator[Live]:
    """A server that prints its address on standard output or in its log. It is killed at the end, if it still runs.

    ``under``: a program that runs it, such as a profiler."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*under, sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        )
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address, log.read_text()
        yield Live(address, process, log)
    finally:
        end(process)


def live(
    log: Path, *, step_s: float = 0.001, max_model_len: int = 4096, under: Sequence[str] = (), **options: Any
) -> Any:
    """``options``: those of ``ServeOptions`` that JSON can say, ``limits`` as a dictionary, ``tokenizer`` as a folder,
    and ``turns``: more scripts, whose seeds follow ``SEEDS``."""
    told = log.with_name(f"{log.name}.json")  # a plan is too long for an argument
    told.write_text(json.dumps({"step_s": step_s, "max_model_len": max_model_len, "keys": [KEY], **options}))
    return command(["support.live_server", str(told)], log, under)


def main() -> int:
    # Imported here, as a program: the tests that only start one need none of it.
    from microscale.cli.serving import run
    from microscale.engine.client.launch import Launch
    from microscale.engine.config import EngineConfig
    from microscale.server.options import RequestLimits, ServeOptions
    from support.tiny_tokenizers import tiny

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    told = json.loads(Path(sys.argv[1]).read_text())
    folder = told.pop("tokenizer", None)
    tokenizer = tiny() if folder is None else Tokenizer.load(Path(folder))
    if folder is None:
        tokenizer.protect(names.NAMES)
    overrides = {"scripts": scripts(tokenizer), "step_s": told.pop("step_s"), "plan": told.pop("plan", "scripted")}
    overrides["scripts"] += [tokenizer.encode_with_control(turn) for turn in told.pop("turns", [])]
    overrides["rules"] = told.pop("rules", [])
    factory = ("--factory", told.pop("factory", "support.scripted_service:load"))
    options = ServeOptions(
        engine=EngineConfig("scripted", hf_overrides=overrides, max_model_len=told.pop("max_model_len")),
        tokenizer=tokenizer,
        names=(MODEL, "other-name", *told.pop("more_names", [])),
        port=0,
        keys=tuple(key.encode() for key in told.pop("keys")),
        limits=RequestLimits(**told.pop("limits", {})),
        launch=Launch(command=(sys.executable, "-m", "microscale.engine.process", *factory)),
        on_ready=lambda ready, address: print(address, flush=True),
        **told,
    )
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
