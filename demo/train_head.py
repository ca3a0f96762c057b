"""Trains the embedded model's draft head: EAGLE3, in EAGLE's own layout. Resumes, keeps to a time, logs, and exports.

    python -m demo.train_head --run build/head --target src/microscale/demo_model --minutes 8 --export OUT

The target is frozen. Each step runs it over new documents; the head learns to say what it says there, over a chain of
guesses (``draft_head.py``). Later guesses count less, as they are less often reached.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from demo.draft_head import DraftHead, Guesses, Lesson, acceptance
from demo.export import load_exported
from demo.export_head import export_head
from demo.feed import Feed, Source
from demo.model import Model, Options
from demo.optimizer import Optimizer, Rates
from demo.shards import ROW, ROWS_PER_SHARD, Recipe
from demo.train import DECAY, MAX_NORM, STATE, Schedule
from microscale.models.draft_heads.config import Eagle3Config, HeadReads, LayerShape
from microscale.models.gpt_oss.config import GptOssConfig, read_config
from microscale.models.rope import PlainRope

LATER = 0.8
"""What a guess counts, of the one before it."""
SEED = 7
"""Of the head's documents: the target was trained on those of 0."""
FIRST_ROWS = 64
"""Rows from which the draft vocabulary is chosen."""


def shape_for(target: GptOssConfig, asked: argparse.Namespace) -> Eagle3Config:
    """A head of the target's own width and heads."""
    layer = LayerShape(
        hidden=target.hidden,
        intermediate=asked.intermediate,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rope=PlainRope(10000.0),
        rms_epsilon=target.rms_epsilon,
        head_norms=False,
        attention_bias=False,
        max_context=target.max_context,
    )
    return Eagle3Config(
        layer=layer,
        reads=HeadReads(tuple(asked.taps), target.hidden, target.vocab_size),
        draft_vocab_size=asked.draft_vocab,
        maps_vocabulary=True,
        norm_before_fc=False,
        norm_of_each_tap=False,
        norm_before_residual=False,
        norm_output=False,
        own_embedding=False,
        own_lm_head=True,
    )


def commonest(feed: Feed, count: int, vocab: int, device: torch.device) -> Tensor:
    """The tokens that the assistant says most often, in the order of their ids; ties go to the lower id."""
    batch = feed.take(FIRST_ROWS, device)
    said = torch.zeros(vocab, device=device).scatter_add_(0, batch.tokens.flatten(), batch.weights.flatten())
    return said.cpu().sort(descending=True, stable=True).indices[:count].sort().values.to(device)


class HeadTrainer:
    """Head, target, optimizer, data and clock of one run."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.device = torch.device(asked.device)
        torch.manual_seed(asked.seed)
        torch.set_float32_matmul_precision("high")
        config = read_config(asked.target).config
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.target = Model(config, Options(dtype, frozen=True)).to(self.device).requires_grad_(False)
        load_exported(self.target, asked.target)
        recipe = Recipe(asked.target, asked.seed, asked.rows_per_shard, asked.length)
        self.feed = Feed(Source(asked.run / "shards", recipe, asked.workers))
        draft_ids = commonest(self.feed, asked.draft_vocab, config.vocab_size, self.device)
        tap_rms = self.lesson().tapped.unflatten(-1, (len(asked.taps), -1)).square().mean((0, 1, 3)).sqrt()
        self.head = DraftHead(shape_for(config, asked), self.target, draft_ids, tap_rms).to(self.device)
        self.optimizer = Optimizer(self.head.named_parameters())
        self.step_idx, self.seconds = 0, 0.0
        self.schedule = Schedule(asked.steps, asked.total_minutes * 60)
        self.state_path = asked.run / STATE
        if self.state_path.exists():
            self._load(torch.load(self.state_path, map_location=self.device, weights_only=True))

    def _load(self, state: dict[str, Any]) -> None:
        self.head.load_state_dict(state["head"])
        self.optimizer.load(state["optimizer"])
        self.step_idx, self.seconds, self.feed.position = state["step"], state["seconds"], state["position"]

    def save(self) -> None:
        """The state appears whole or not at all."""
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state(), "step": self.step_idx,
                 "seconds": self.seconds, "position": self.feed.position}  # fmt: skip
        self.state_path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.state_path.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.rename(self.state_path)

    @torch.no_grad()
    def lesson(self) -> Lesson:
        """The next documents, and what the target makes of them."""
        batch = self.feed.take(self.asked.rows, self.device)
        streams: list[Tensor] = []
        hidden, _ = self.target.hidden(batch.tokens, batch.documents, streams)
        logits = (hidden @ self.target.lm_head.to(hidden.dtype).T).float()
        tapped = torch.cat([streams[tap] for tap in self.asked.taps], dim=-1)
        return Lesson(batch.tokens, batch.documents, batch.weights, tapped, logits)

    def step(self) -> list[Guesses]:
        found: list[Guesses] = self.head(self.lesson(), self.asked.guesses)
        loss = sum((LATER**at * guess.loss for at, guess in enumerate(found)), torch.zeros((), device=self.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_NORM)
        rate = self.asked.lr * self.schedule.factor(self.schedule.progress(self.step_idx, self.seconds))
        self.optimizer.step(Rates(rate, rate, DECAY))
        self.step_idx += 1
        return found

    def run(self) -> None:
        """Until this call's time or the whole training is over."""
        asked, begun, saved = self.asked, time.monotonic(), self.seconds
        while self.schedule.progress(self.step_idx, self.seconds) < 1 and time.monotonic() - begun < asked.minutes * 60:
            start = time.monotonic()
            found = self.step()
            if self.step_idx % asked.log_every == 0:
                self.log(found, time.monotonic() - start)
            self.seconds += time.monotonic() - start
            if self.seconds - saved > 120:
                saved = self.seconds
                self.save()
        self.save()
        if asked.export is not None:
            export_head(self.head, asked.export)
        self.feed.close()

    def log(self, found: list[Guesses], took: float) -> None:
        rates, length = acceptance(found)
        figures = {
            "step": self.step_idx,
            "minutes": round(self.seconds / 60, 3),
            "loss": [round(float(guess.loss.detach()), 4) for guess in found],
            "accepted": [round(rate, 3) for rate in rates],
            "tokens_a_step": round(length, 3),
            "seconds": round(took, 3),
        }
        line = json.dumps(figures)
        print(line, flush=True)
        if self.asked.log is not None:
            self.asked.log.parent.mkdir(parents=True, exist_ok=True)
            with self.asked.log.open("a") as file:
                file.write(line + "\n")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="state and shards; a second call goes on from there")
    parser.add_argument("--target", type=Path, required=True, help="the model's checkpoint, with its tokenizer")
    parser.add_argument("--taps", type=int, nargs="+", default=[2, 5, 8], help="layers run before each")
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--guesses", type=int, default=5, help="of a chain")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--total-minutes", type=float, default=6.0, help="of training steps, over all calls")
    parser.add_argument("--steps", type=int, help="of the whole training, instead of --total-minutes")
    parser.add_argument("--rows", type=int, default=32, help="in a step")
    parser.add_argument("--length", type=int, default=ROW, help="tokens in a row, and most in a document")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--workers", type=int, default=0, help="processes that make data")
    parser.add_argument("--rows-per-shard", type=int, default=ROWS_PER_SHARD)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--export", type=Path, help="write the head here when the call ends")
    return parser.parse_args(words)


if __name__ == "__main__":
    HeadTrainer(arguments()).run()
