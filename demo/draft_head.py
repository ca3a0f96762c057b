"""An EAGLE3 head for training: what it computes for a chain of guesses after every token of a document, at once.

At *origin* i the head is told what its target had in its residual stream at position i, and token i + 1. Its first
guess is token i + 2. It then goes on by itself: guess k reads its own state of guess k - 1 and token i + k, which is
the document's (had the guess been another, it would be rejected, and what follows thrown away). That is training-time
testing: the head learns on the states that it will meet.

Guess k of origin i attends to the first rows of all origins up to i, as the cache holds them after a step of the
target, and to its own rows of guesses 2 to k.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo import attention
from demo.model import Model, normal, rounded
from microscale.models.draft_heads.config import Eagle3Config, head_rope_table

CALM = 0.25
"""Of the target's last norm, at the start: a guess that knows nothing yet should not be sure of itself."""


@dataclass(frozen=True)
class Lesson:
    """A batch as the target sees it."""

    tokens: Tensor  # [rows, length]
    documents: Tensor  # [rows, length]
    weights: Tensor  # [rows, length]: how much each token counts as something to guess
    tapped: Tensor  # [rows, length, taps * hidden]
    targets: Tensor  # [rows, length, vocabulary]: the target's logits


@dataclass(frozen=True)
class Guesses:
    """What became of one guess, of all origins."""

    loss: Tensor
    right: Tensor  # [rows, length]: the target's own choice was guessed
    counts: Tensor  # [rows, length]: there was something to guess, and it was the assistant's


class DraftHead(nn.Module):
    """Parameters are called as the optimizer knows them: matrices inside the layer by one letter or word."""

    def __init__(self, config: Eagle3Config, target: Model, draft_ids: Tensor, tap_rms: Tensor) -> None:
        """``draft_ids``: the target's id of each draft token; ``tap_rms``: the size of each tap. It begins with states
        of size 1 that have a like share of every tap, and with the target's lm_head, less sure of itself."""
        super().__init__()
        self.config = config
        layer, reads = config.layer, config.reads
        hidden, heads, kv = layer.hidden, layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        shares = torch.randn(hidden, reads.width) * reads.width**-0.5
        self.fc = nn.Parameter(shares / tap_rms.cpu().repeat_interleave(reads.target_hidden))
        self.q, self.k, self.v = (normal(rows, 2 * hidden, std=(2 * hidden) ** -0.5) for rows in (heads, kv, kv))
        self.o = normal(hidden, heads, std=0.5 * heads**-0.5)
        self.gate_up = normal(2 * layer.intermediate, hidden, std=hidden**-0.5)
        self.down = normal(hidden, layer.intermediate, std=0.5 * layer.intermediate**-0.5)
        for name in ("hidden_norm", "input_norm", "mlp_norm"):
            self.register_parameter(name, nn.Parameter(torch.ones(hidden)))
        self.norm = nn.Parameter(target.norm.detach() * CALM)
        self.lm_head = nn.Parameter(target.lm_head.detach()[draft_ids].clone())
        self.register_buffer("draft_ids", draft_ids)
        self.register_buffer("embed", target.embed.detach().bfloat16().float())

    def forward(self, lesson: Lesson, steps: int) -> list[Guesses]:
        """Guesses 1 to ``steps`` of every origin."""
        return [self._judge(logits, lesson, step) for step, logits in enumerate(self.chain(lesson, steps), 1)]

    def chain(self, lesson: Lesson, steps: int) -> list[Tensor]:
        """The logits ``[rows, length, draft vocabulary]`` of each guess, of every origin."""
        c = self.config.layer
        table = head_rope_table(c.rope, c.head_dim, lesson.tokens.device)
        places = attention.positions(lesson.documents)
        mask = attention.make_mask(lesson.documents, None, flexible=False)
        state = F.linear(lesson.tapped, rounded(self.fc))
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(1, steps + 1):
            read = F.embedding(later(lesson.tokens, step), self.get_buffer("embed"))
            both = torch.cat((self._norm(read, "input_norm"), self._norm(state, "hidden_norm")), dim=-1)
            q, k, v = (self._heads(both, rounded(weight)) for weight in (self.q, self.k, self.v))
            rope = attention.rope_of(table, places + (step - 1))
            keys.append(attention.rotate(k, *rope))
            values.append(v)
            attended = attend(attention.rotate(q, *rope), keys, values, mask)
            state = state + F.linear(attended, rounded(self.o))
            gate, up = F.linear(self._norm(state, "mlp_norm"), rounded(self.gate_up)).chunk(2, dim=-1)
            state = state + F.linear(F.silu(gate) * up, rounded(self.down))
            found.append(F.linear(self._norm(state, "norm"), rounded(self.lm_head)))
        return found

    def _judge(self, logits: Tensor, lesson: Lesson, step: int) -> Guesses:
        """Against the target's distribution over the draft vocabulary, where the target's choice is in that."""
        ids = self.get_buffer("draft_ids")
        theirs = later(lesson.targets, step)
        choice = theirs.argmax(-1)
        wanted = theirs[..., ids].log_softmax(-1)
        losses = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1)
        documents = lesson.documents
        same = later(documents, step + 1, fill=-1) == documents
        weights = later(lesson.weights, step + 1) * same
        known = weights * torch.isin(choice, ids)
        loss = (losses * known).sum() / known.sum().clamp(min=1e-6)
        return Guesses(loss, ids[logits.detach().argmax(-1)] == choice, weights > 0.5)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], None, self.config.layer.rms_epsilon) * rounded(self.get_parameter(name))

    def _heads(self, x: Tensor, weight: Tensor) -> Tensor:
        projected = F.linear(x, weight)
        return projected.view(*x.shape[:-1], -1, self.config.layer.head_dim).transpose(1, 2)


def later(x: Tensor, steps: int, fill: float = 0) -> Tensor:
    """What stands so many places later in the row; ``fill`` behind its end."""
    end = torch.full_like(x[:, :steps], fill)
    return torch.cat((x[:, steps:], end), dim=1)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: attention.Mask) -> Tensor:
    """``q [rows, heads, length, head_dim]``. The first keys are seen as ``mask`` says, the others at their own origin
    alone. Gives ``[rows, length, heads * head_dim]``."""
    assert isinstance(mask, Tensor)
    group = q.shape[1] // keys[0].shape[1]
    keys, values = ([x.repeat_interleave(group, dim=1) for x in part] for part in (keys, values))
    length = q.shape[2]
    scores = (q @ keys[0].transpose(-1, -2)).masked_fill(~mask[:, None], -torch.inf)
    own = [(q * k).sum(-1, keepdim=True) for k in keys[1:]]
    shares = torch.softmax(torch.cat((scores, *own), dim=-1) * q.shape[-1] ** -0.5, dim=-1)
    out = shares[..., :length] @ values[0]
    for at, v in enumerate(values[1:], length):
        out = out + shares[..., at : at + 1] * v
    return out.transpose(1, 2).flatten(2)


def acceptance(guesses: list[Guesses]) -> tuple[list[float], float]:
    """Of origins at which every guess counts: how often each is right if those before it are; and the mean number of
    tokens that a step gives, its own included."""
    counts = torch.stack([g.counts for g in guesses]).all(0)
    right = torch.stack([g.right for g in guesses])[:, counts].cumprod(0).float()
    total = max(1, int(counts.sum()))
    kept = [total, *(float(row.sum()) for row in right)]
    rates = [after / max(1.0, before) for before, after in pairwise(kept)]
    return rates, 1 + sum(kept[1:]) / total
