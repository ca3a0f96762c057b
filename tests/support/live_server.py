"""A real server in its own process over ``scripted_service``: started by tests, and runnable as a module."""

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
OTHER_KEY = "sk-other"
MODEL = "scripted"
CONTEXT = 4096
PAGE = "https://chat.example"
"""An origin that may call the shared server."""
CALL = "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+naïve "👩‍👧"\n*** End Patch\n'
TOOL_CALLS = {
    "apply_patch": json.dumps({"input": PATCH}),
    "spawn_agent": '{"message": "go"}',
    "local_shell": '{"command": ["ls", "-l"], "timeout_ms": 5}',
    "shell": '{"commands": ["ls", "pwd"]}',
    "apply_patch_file": '{"type": "delete_file", "path": "a.txt"}',
    "broken shell": "ls -l",
}

TURNS = {
    "answer": "<|channel|>analysis<|message|>Let me think: naïve 👩‍👧.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>The answer is 4. 日本<|return|>",
    "call": "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>',
    "no header": "Just text.<|return|>",
    "only thoughts": "<|channel|>analysis<|message|>Hm.<|return|>",
    "plain": "one two STOP three<|endoftext|>",
    "stop": "<|channel|>final<|message|>one two STOP three<|return|>",
    "continued": "and so on.<|return|>",
    "sum": '<|channel|>final<|message|>{"total": 4}<|return|>',
    "broken": CALL + '{"city": <|call|>',
    "no object": CALL + '["Paris"]<|call|>',
    "no input": CALL + "<|call|>",
    "preamble": "<|channel|>analysis<|message|>Hm.<|end|>"
    "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Now.<|end|>"
    f'<|start|>assistant{CALL}{{"city":"Rome"}}<|call|>',
    **{
        name: "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.{name.removesuffix('_file').removeprefix('broken ')} <|constrain|>json<|message|>{call}<|call|>"
        for name, call in TOOL_CALLS.items()
    },
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
    log: Path, *, step_s: float = 0.001, max_model_len: int = CONTEXT, under: Sequence[str] = (), **options: Any
) -> Any:
    """``options``: those of ``ServeOptions`` that JSON can express, ``limits`` and ``sampling`` as dictionaries,
    ``tokenizer`` as a folder, and ``turns``: more scripts, whose seeds follow ``SEEDS``."""
    options_file = log.with_name(f"{log.name}.json")  # a plan is too long for an argument
    options_file.write_text(json.dumps({"step_s": step_s, "max_model_len": max_model_len, "keys": [KEY], **options}))
    return command(["support.live_server", str(options_file)], log, under)


def main() -> int:
    # Imported here: tests that only start a server need none of it.
    from microscale.cli.serve import run_server as run
    from microscale.engine.client.launch import EngineProcess
    from microscale.engine.config import EngineConfig
    from microscale.server.options import RequestLimits, SamplingDefaults, ServeOptions
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
        sampling=SamplingDefaults(**told.pop("sampling", {})),
        launch=EngineProcess(command=(sys.executable, "-m", "microscale.engine.process", *factory)),
        on_ready=lambda ready, address: print(address, flush=True),
        **told,
    )
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
