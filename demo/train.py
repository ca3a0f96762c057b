"""Trains the embedded model: resumes where it stopped, keeps to a time, logs, and exports the checkpoint at the end.

    python -m demo.train --run build/demo --tokenizer demo/tokenizer --minutes 9 --total-minutes 24 --export OUT

The learning rate follows the time (or, with ``--steps``, the number of steps) that the whole training will have:
warm-up, a constant part, and a linear descent to zero. ``--minutes`` ends this call earlier; the next one goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo.data.mixture import TASKS
from demo.export import export, load_exported
from demo.feed import Feed, Source
from demo.greedy import ASKED, accuracies
from demo.model import Model, Options
from demo.optimizer import Optimizer, Rates
from demo.shape import SHAPES
from demo.shards import ROW, ROWS_PER_SHARD, Recipe

STATE = "state.pt"
BALANCE = 0.01
WARM_UP = 0.02
DESCENT = 0.6
"""The last part of the training, in which the learning rate goes to zero."""
DECAY = 0.02
MAX_NORM = 1.0


@dataclass(frozen=True)
class Schedule:
    """How far the training is, from 0 to 1: by steps, or else by seconds."""

    total_steps: int | None
    total_seconds: float

    def progress(self, step: int, seconds: float) -> float:
        done = step / self.total_steps if self.total_steps else seconds / self.total_seconds
        return min(1.0, done)

    @staticmethod
    def factor(progress: float) -> float:
        """What the learning rate is multiplied by."""
        return min(1.0, (progress + 1e-3) / WARM_UP, (1 - progress) / DESCENT)


class Trainer:
    """Model, optimizer, data and clock of one run."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.device = torch.device(asked.device)
        torch.manual_seed(asked.seed)
        torch.set_float32_matmul_precision("high")
        self.model = Model(SHAPES[asked.shape]).to(self.device)
        self.optimizer = Optimizer(self.model.named_parameters())
        self.step_idx, self.seconds, position = 0, 0.0, 0
        self.state_path = asked.run / STATE
        if self.state_path.exists():
            position = self._load(torch.load(self.state_path, map_location=self.device, weights_only=True))
        elif asked.start_from is not None:
            load_exported(self.model, asked.start_from)
            self.seconds, position = asked.start_minutes * 60, asked.start_row
        self.model.options = choose_options(self.model, asked)
        recipe = Recipe(asked.tokenizer, asked.seed, asked.rows_per_shard, asked.length, tuple(asked.only))
        self.feed = Feed(Source(asked.run / "shards", recipe, asked.workers), position)
        self.schedule = Schedule(asked.steps, asked.total_minutes * 60)

    def _load(self, state: dict[str, Any]) -> int:
        self.model.load_state_dict(state["model"])
        self.optimizer.load(state["optimizer"])
        self.step_idx, self.seconds = state["step"], state["seconds"]
        return int(state["position"])

    def save(self) -> None:
        """The state appears whole or not at all."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state(), "step": self.step_idx,
                 "seconds": self.seconds, "position": self.feed.position}  # fmt: skip
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.state_path.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.rename(self.state_path)

    def step(self) -> dict[str, float]:
        batch = self.feed.take(self.asked.rows, self.device)
        loss, balance = self.model.loss(batch.tokens, batch.documents, batch.weights)
        (loss + BALANCE * balance).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        factor = self.schedule.factor(self.schedule.progress(self.step_idx, self.seconds))
        self.optimizer.step(Rates(self.asked.lr * factor, self.asked.lr * factor, DECAY))
        self.step_idx += 1
        if self.step_idx % self.asked.log_every:
            return {}
        seen = {"loss": loss.detach(), "balance": balance.detach(), "norm": norm}
        return {**{name: float(value) for name, value in seen.items()}, "lr": self.asked.lr * factor}

    def run(self) -> None:
        """Until this call's time or the whole training is over. Time is counted while steps run, not while it starts,
        evaluates or writes."""
        asked = self.asked
        begun = time.monotonic()
        saved = evaluated = self.seconds
        first_step, first_second = self.step_idx, self.seconds
        while self.schedule.progress(self.step_idx, self.seconds) < 1 and time.monotonic() - begun < asked.minutes * 60:
            start = time.monotonic()
            figures = self.step()
            if self.device.type == "cuda" and self.step_idx % 8 == 0:
                torch.cuda.synchronize()
            self.seconds += time.monotonic() - start
            if figures:
                rate = (self.step_idx - first_step) * asked.rows * asked.length / max(1e-9, self.seconds - first_second)
                self.log(**figures, tokens_per_second=round(rate))
            if self.seconds - evaluated > asked.evaluate_minutes * 60:
                evaluated = self.seconds
                self.evaluate()
            if self.seconds - saved > 120:
                saved = self.seconds
                self.save()
        self.save()
        self.evaluate()
        if asked.export is not None:
            export(self.model, asked.export, asked.tokenizer)
        self.feed.close()

    def evaluate(self) -> None:
        if self.asked.evaluate:
            start = time.monotonic()
            tasks = self.asked.only or ASKED
            found = accuracies(self.model, self.asked.tokenizer, self.device, self.asked.evaluate, tasks)
            self.log(accuracy=found, took=round(time.monotonic() - start, 1))

    def log(self, **figures: Any) -> None:
        at = {"step": self.step_idx, "minutes": round(self.seconds / 60, 3), "row": self.feed.position}
        line = json.dumps({**at, **figures})
        print(line, flush=True)
        if self.asked.log is not None:
            self.asked.log.parent.mkdir(parents=True, exist_ok=True)
            with self.asked.log.open("a") as file:
                file.write(line + "\n")


def choose_options(model: Model, asked: argparse.Namespace) -> Options:
    """The fast paths, where they run and are as near to float32 as the plain one; what is not is said and left."""
    if torch.device(asked.device).type == "cpu":
        return Options()
    exact = gradients(model, Options(), asked)
    chosen = Options(torch.bfloat16)
    plain = distance(gradients(model, chosen, asked), exact)
    for part, fast in (("experts", "grouped"), ("attention", "flex"), ("gate", "compiled")):
        if getattr(asked, part) not in ("auto", fast):
            continue
        tried = replace(chosen, **{part: fast})  # type: ignore[arg-type]
        try:
            away = distance(gradients(model, tried, asked), exact)
        except Exception as error:  # whatever a compiler or a missing kernel raises
            print(f"{part}: {fast} does not run here: {str(error)[:500]}", flush=True)
            continue
        print(f"{part}: {fast} is {away:.4f} from float32, the plain path {plain:.4f}", flush=True)
        if away < 1.5 * plain:
            chosen = tried
    return chosen


def gradients(model: Model, options: Options, asked: argparse.Namespace) -> Tensor:
    """All gradients of a step of full size: what is compiled here is what training uses."""
    size, device = (asked.rows, asked.length), torch.device(asked.device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.vocab_size, size, generator=generator).to(device)
    documents = (torch.arange(asked.length) // 300).int().expand(size).contiguous().to(device)
    model.options = options
    model.loss(tokens, documents, torch.ones(size, device=device))[0].backward()
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return found


def distance(found: Tensor, exact: Tensor) -> float:
    """Relative to the size of the exact ones."""
    return float((found - exact).norm() / exact.norm())


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="state and shards; a second call goes on from there")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--total-minutes", type=float, default=22.0, help="of training steps, over all calls")
    parser.add_argument("--steps", type=int, help="of the whole training, instead of --total-minutes")
    parser.add_argument("--rows", type=int, default=64, help="in a step")
    parser.add_argument("--length", type=int, default=ROW, help="tokens in a row, and most in a document")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0, help="processes that make data")
    parser.add_argument("--rows-per-shard", type=int, default=ROWS_PER_SHARD)
    parser.add_argument("--only", nargs="*", default=(), choices=TASKS, help="tasks, for a trial")
    parser.add_argument("--attention", choices=("auto", "plain", "flex"), default="auto")
    parser.add_argument("--experts", choices=("auto", "loop", "grouped"), default="auto")
    parser.add_argument("--gate", choices=("auto", "plain", "compiled"), default="auto")
    parser.add_argument("--evaluate", type=int, default=32, help="prompts of each task; 0 for none")
    parser.add_argument("--evaluate-minutes", type=float, default=4.0)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--export", type=Path, help="write the checkpoint here when the call ends")
    parser.add_argument("--start-from", type=Path, help="an exported checkpoint, where no state was kept")
    parser.add_argument("--start-minutes", type=float, default=0.0, help="minutes that it was trained for")
    parser.add_argument("--start-row", type=int, default=0, help="rows that it has seen")
    return parser.parse_args(words)


if __name__ == "__main__":
    Trainer(arguments()).run()
