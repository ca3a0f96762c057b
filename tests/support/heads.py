"""Draft heads for tests: the trained one of the embedded model, random ones for any model, and what a head guesses
after some tokens if everything is computed anew."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from microscale.engine.request import Request
from microscale.engine.speculation.drafter import Context, DraftTarget, LaunchedStep
from microscale.engine.speculation.head import HeadDrafter
from microscale.models import embedded
from microscale.models.config import OWN_FORMATS, HeadFormats, LayerKind
from microscale.models.draft_heads.config import DFlashConfig, Eagle3Config, HeadReads, LayerShape, SeparateHeadConfig
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds, Verified
from microscale.models.draft_heads.heads import bind_head, open_head_weights
from microscale.models.draft_heads.weights import DummyHead, HeadWeights
from microscale.models.dummy_weights import RandomTensors
from microscale.models.families import AnyModel
from microscale.models.rope import PlainRope
from microscale.models.taps import Taps
from microscale_lab.batches import SequenceChunk, build_batch
from microscale_lab.heads import ops_for_head
from support.demo_prompts import demo_model


def bound(weights: HeadWeights, model: AnyModel, formats: HeadFormats = OWN_FORMATS) -> DraftHead:
    ends = TargetEnds(model.embed, model.lm_head, getattr(model, "norm", None))
    return bind_head(weights, ops_for_head(model.ops, formats), model.device, model.page_size, ends)


@cache
def trained_head(page_size: int = 16) -> DraftHead:
    model = demo_model(page_size)
    return bound(open_head_weights(str(embedded.DRAFT_HEAD), model.config), model)


def random_config(kind: str, model: AnyModel) -> SeparateHeadConfig:
    target = model.config
    layer = LayerShape(target.hidden, 96, 4, 2, 64, PlainRope(1e4), 1e-5, kind == "dflash", False, 4096)
    reads = HeadReads((1, target.num_layers), target.hidden, target.vocab_size)
    if kind == "dflash":
        return DFlashConfig(layer, 2, reads, 8, target.vocab_size - 1)
    return Eagle3Config(layer, reads, target.vocab_size, False, False, False, False, False, False, True)


def random_head(kind: str, model: AnyModel, std: float = 8.0) -> DraftHead:
    """Its weights are ``std`` times the usual ones, so that what it guesses depends on all that it reads."""

    class Large(RandomTensors):
        def normal(self, *args: object, **options: object) -> torch.Tensor:
            drawn = super().normal(*args, **options)  # type: ignore[arg-type]
            return drawn * std if drawn.ndim == 2 else drawn

    return bound(DummyHead(random_config(kind, model), Large(5)), model)


class RecordingDrafter(HeadDrafter):
    """Keeps what it was asked and what it said."""

    def __init__(self, head: DraftHead, most: int) -> None:
        super().__init__(head, most)
        self._asked: list[tuple[Request, int, tuple[int, ...]]] = []
        self.num_ahead = 0
        """Drafts that ran before anybody had read what they follow."""

    def propose(self, contexts: Sequence[Context]) -> list[Sequence[int]]:
        found = super().propose(contexts)
        for context, draft in zip(contexts, found, strict=True):
            self._asked.append((context.request, len(context.request.tokens), tuple(draft)))
        return found

    def observe(self, step: LaunchedStep, most: int) -> None:
        if step.ahead is not None:
            each = zip(step.schedule, step.ahead.accepted.tolist(), step.ahead.drafts.tolist(), strict=True)
            for work, accepted, draft in each:
                known = work.first + accepted + 1
                self._asked.append((work.request, known, tuple(draft[: len(work.drafts)])))
                self.num_ahead += bool(work.drafts)
        super().observe(step, most)

    @property
    def said(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Tokens, and the draft after them. A request may have ended in the midst of what was drafted ahead."""
        asked = ((request.tokens, known, draft) for request, known, draft in self._asked)
        return [(tuple(tokens[:known]), draft) for tokens, known, draft in asked if len(tokens) >= known]


class PaddedDrafter(RecordingDrafter):
    """Fills its steps up as captured ones are, also where nothing is captured."""

    def attach(self, target: DraftTarget) -> None:
        super().attach(target)
        self._padded = True


class Anew:
    """What a head guesses after tokens: one pass of the target over all of them, then one of the head. Of tokens that
    begin others, which were asked for before, the first pass is known."""

    def __init__(self, model: AnyModel, head: DraftHead) -> None:
        self._model, self._head = model, head
        self._known: list[tuple[tuple[int, ...], torch.Tensor]] = []

    @torch.inference_mode()
    def guesses(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        head, size = self._head, self._model.page_size
        pages = dict.fromkeys(LayerKind, range(-(-(len(tokens) + count + 1) // size)))
        batch = build_batch([SequenceChunk(tokens[1:], 0, pages, 1)], size, self._model.device)
        kv = head.new_cache(len(pages[LayerKind.FULL]))
        return tuple(head.draft(Verified(batch, self._tapped(tuple(tokens[:-1]))), kv, count)[0].tolist())

    def _tapped(self, tokens: tuple[int, ...]) -> torch.Tensor:
        model, rows = self._model, len(tokens)
        for known, tapped in self._known:
            if known[:rows] == tokens:
                return tapped[:rows]
        pages = dict.fromkeys(LayerKind, range(-(-rows // model.page_size)))
        taps = Taps.empty(self._head.config.reads.taps, rows, model.config.hidden, model.ops.dtype, model.device)
        cache = model.new_cache(dict.fromkeys(LayerKind, len(pages[LayerKind.FULL])))
        model.forward(build_batch([SequenceChunk(tokens, 0, pages, 0)], model.page_size, model.device), cache, taps)
        self._known.append((tokens, taps.rows))
        return taps.rows
