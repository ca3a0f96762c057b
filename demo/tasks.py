"""Held-out samples as the tasks that are shipped beside the model and asked by ``microscale quality``.

python -m demo.tasks OUT/tasks.jsonl.gz
"""

from __future__ import annotations

import argparse
from pathlib import Path

from demo.data.base import Sample
from demo.data.mixture import TASKS, held_out
from microscale_lab.quality.tasks import HeldOutTask, TaughtMessage, dump_tasks

PER_TASK = 32


def as_task(sample: Sample, name: str | None = None) -> HeldOutTask:
    """The first answer of the sample's turn: a later one follows a tool's result."""
    first = sample.turn[0]
    answer = [TaughtMessage("analysis", None, first.reasoning)] if first.reasoning else []
    if first.tool_calls:
        answer += [TaughtMessage("commentary", call.name, call.arguments) for call in first.tool_calls]
    else:
        answer.append(TaughtMessage("final", None, first.content))
    return HeldOutTask(name or sample.task, sample.history, sample.options, tuple(answer), sample.check)


def all_tasks(per_task: int, seed: int = 0) -> list[HeldOutTask]:
    return [as_task(sample, name) for name in TASKS for sample in held_out(name, per_task, seed)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--per-task", type=int, default=PER_TASK)
    asked = parser.parse_args()
    dump_tasks(all_tasks(asked.per_task), asked.out)
