"""``pick``: which of an implementation's paths runs a batch, and why not the others. The oracle's second question.

An implementation lists its paths in order; the first that supports the spec runs it. Nothing else asks a path, so what
runs is what ``explain`` prints: ``spans`` asks the same for every batch size and says where the answer changes. A path
whose code the installed Triton is known to compile wrong for the card is refused here, whatever it says for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from typing import Any, Generic, TypeVar

from microscale.errors import Unsupported
from microscale.hardware import Gpu, triton_faults
from microscale.kernels.attention.op import AttentionOp
from microscale.kernels.attention.spec import AttentionSpec, BatchShape
from microscale.kernels.dense.spec import DenseOp
from microscale.kernels.moe.spec import MoeOp
from microscale.kernels.op import Implementation, Path, Reason
from microscale.kernels.sampling.spec import SamplingFeatures, SamplingOp
from microscale.kernels.small.spec import SmallOps
from microscale.planning.decision import PathSpan, Rejected

PathT = TypeVar("PathT", bound=Path[Any])
EVERY_SIZE_TO = 128
"""Tokens up to which every number is asked; beyond, eight from each power of two to the next, and where two neighbours
differ, the very number."""
PATH_LISTS = (
    "paths", "logits_paths", "sum_paths", "parts_paths", "mlp_paths", "fused_paths", "route_paths",
    "norm_add_norm_route_paths", "score_paths",
)  # fmt: skip
"""Where implementations list their paths, one list for each form that they may be asked for."""
VERIFIED = 4
"""Tokens of each sequence where ``explain`` shows how drafts are verified: three of them."""
LM_HEAD = "lm_head"
"""The layer that is asked for logits, as plans and ``--layer-format`` call it."""


@dataclass(frozen=True)
class Pick(Generic[PathT]):
    """The path that runs a spec, if one does, and why not the others."""

    path: PathT | None
    rejected: tuple[Rejected, ...]

    @property
    def refusal(self) -> Reason | None:
        """Why none of them runs; ``None`` where one does."""
        if self.path is not None:
            return None
        return self.rejected[0].reason if self.rejected else "has no such form"


def refusal(path: Path[Any], spec: Any, gpu: Gpu) -> Reason | None:
    """Why a path does not run the spec on this GPU: its own reason, or a fault of the Triton that compiles for it."""
    return path.supports(spec, gpu) or triton_faults.refusal(path.uses, gpu.triton, gpu.sm)


def pick(paths: Sequence[PathT], spec: Any, gpu: Gpu) -> Pick[PathT]:
    """The first path that supports the spec."""
    chosen: PathT | None = None
    rejected = []
    for path in paths:
        reason = refusal(path, spec, gpu)
        if chosen is not None:
            reason = reason or f"{chosen.name} goes first: {chosen.first_because}"
        if reason is None:
            chosen = path
        else:
            rejected.append(Rejected(path.name, reason))
    return Pick(chosen, tuple(rejected))


def first_path(paths: Sequence[PathT], spec: Any, gpu: Gpu) -> PathT | None:
    """What ``pick`` picks, without asking the others."""
    return next((path for path in paths if refusal(path, spec, gpu) is None), None)


def path_for(paths: Sequence[PathT], spec: Any, gpu: Gpu) -> PathT:
    """The path that runs the spec, or an error with every reason."""
    found = first_path(paths, spec, gpu)
    if found is None:
        reasons = "; ".join(f"{entry.name} {entry.reason}" for entry in pick(paths, spec, gpu).rejected)
        raise Unsupported(f"No path runs this on {gpu.name}: {reasons or 'there is none'}.")
    return found


class PathList(StrEnum):
    """A form, by the attribute that lists its paths."""

    RUN = "paths"
    LOGITS = "logits_paths"
    FROM_SUM = "sum_paths"
    PARTS = "parts_paths"
    WITH_MLP = "mlp_paths"
    FUSED = "fused_paths"
    ROUTE = "route_paths"
    NORM_ADD_NORM_ROUTE = "norm_add_norm_route_paths"


def ask(entry: Implementation[Any], form: PathList, spec: Any, gpu: Gpu) -> Pick[Any]:
    """Which path of an implementation runs this form of a spec, and why not the others: for cases and tests."""
    return pick(getattr(entry, form.value), spec, gpu)


def path_of(entry: Implementation[Any], form: PathList, spec: Any, gpu: Gpu) -> Any:
    """The path that runs this form of a spec, or an error with every reason."""
    return path_for(getattr(entry, form.value), spec, gpu)


# ---- for every batch size --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerForm:
    """One question that is asked of a layer at every batch size."""

    name: str
    """The kind of batch or call, as ``explain`` prints it; empty where there is one."""
    paths: tuple[Path[Any], ...]
    at: Callable[[Any, int], Any]
    """The spec for a number of tokens."""
    fused: bool = False
    """Where no path runs it, the model takes the ops apart."""


def forms(entry: Implementation[Any], layer: str, spec: Any, kv_fp8: bool = False) -> Iterator[LayerForm]:
    """What a layer of this implementation may be asked."""
    if isinstance(entry, AttentionOp):
        yield from _attention_forms(entry, kv_fp8)
    elif isinstance(entry, SamplingOp):
        yield from _sampling_forms(entry)
    elif isinstance(entry, DenseOp) and layer.partition(".")[0] == LM_HEAD:
        yield LayerForm("", entry.logits_paths, _tokens)
    elif entry.paths:
        yield LayerForm("", entry.paths, _tokens)
    if isinstance(entry, DenseOp) and entry.sum_paths and spec.behind_sum:
        yield LayerForm("with its norm", entry.sum_paths, _tokens, fused=True)
    if isinstance(entry, MoeOp) and entry.parts_paths:
        yield LayerForm("summed by the next norm", entry.parts_paths, _tokens, fused=True)
    if isinstance(entry, MoeOp) and entry.mlp_paths:
        yield LayerForm("with a dense MLP", entry.mlp_paths, _tokens, fused=True)
    if isinstance(entry, SmallOps):
        yield LayerForm("behind a sum", entry.route_paths, _tokens)
        yield LayerForm("between norms", entry.norm_add_norm_route_paths, _tokens)


def _tokens(spec: Any, tokens: int) -> Any:
    return replace(spec, tokens=tokens)


SAMPLINGS = {
    "greedy": SamplingFeatures(blocks=True),
    "temperature": SamplingFeatures(draws=True, blocks=True),
    "top-k or top-p": SamplingFeatures(draws=True, filters=True, blocks=True),
    "with a bias": SamplingFeatures(draws=True, filters=True, adjusts=True, biases=True, blocks=True),
}
"""Batches that ``explain`` shows, by what some row asks for."""


def _sampling_forms(entry: SamplingOp) -> Iterator[LayerForm]:
    def with_features(features: SamplingFeatures) -> Callable[[Any, int], Any]:
        return lambda spec, tokens: replace(spec, tokens=tokens, features=features)

    for name, features in SAMPLINGS.items():
        yield LayerForm(name, entry.paths, with_features(features))
    yield LayerForm("a prompt's tokens", entry.score_paths, with_features(SamplingFeatures()))


def _attention_forms(entry: AttentionOp, kv_fp8: bool) -> Iterator[LayerForm]:
    """Decoding is one token of each sequence at the full context, with drafts ``VERIFIED``; a mixed batch is a prompt
    and a sequence that decodes."""

    def shaped(
        sequences: Callable[[int], int], longest: Callable[[int], int], *, verify: bool = False
    ) -> Callable[[Any, int], Any]:
        def at(spec: AttentionSpec, tokens: int) -> AttentionSpec:
            pages = -(-spec.context // spec.page_size)
            batch = BatchShape(sequences(tokens), longest(tokens), pages, kv_fp8, verify=verify)
            return replace(spec, tokens=tokens, batch=batch)

        return at

    decoding = shaped(lambda tokens: tokens, lambda _: 1)
    yield LayerForm("decode", entry.paths, decoding)
    yield LayerForm("prefill", entry.paths, shaped(lambda _: 1, lambda tokens: tokens))
    yield LayerForm("mixed", entry.paths, shaped(lambda _: 2, lambda tokens: max(1, tokens - 1)))
    if entry.fused_paths:
        yield LayerForm("decode from the projection", entry.fused_paths, decoding, fused=True)
        drafted = shaped(lambda tokens: -(-tokens // VERIFIED), lambda tokens: min(tokens, VERIFIED), verify=True)
        yield LayerForm(f"{VERIFIED - 1} drafts each, from the projection", entry.fused_paths, drafted, fused=True)


def compiled_wrong(entry: Implementation[Any], layer: str, spec: Any, gpu: Gpu, first: int) -> Reason | None:
    """Why the implementation cannot run ``first`` to ``spec.tokens`` tokens with the Triton at hand: at some size every
    path is refused, and at least one for Triton's sake. ``None`` where each size has a path."""
    wrong = {fault.form for fault in triton_faults.faults_of(gpu.triton, gpu.sm)}
    for form in forms(entry, layer, spec):
        suspect = [path for path in form.paths if path.uses & wrong]
        if form.fused or not suspect:
            continue
        for span in _spans_of(form, spec, gpu, first, spec.tokens):
            if span.path is None:
                names = {path.name for path in suspect}
                return next((entry.reason for entry in span.rejected if entry.name in names), None)
    return None


@lru_cache(maxsize=4096)
def spans(
    entry: Implementation[Any], layer: str, spec: Any, gpu: Gpu, first: int, last: int, kv_fp8: bool = False
) -> tuple[PathSpan, ...]:
    """Which path runs ``first`` to ``last`` tokens, form by form. ``spec.tokens`` does not matter."""
    found: list[PathSpan] = []
    for form in forms(entry, layer, spec, kv_fp8):
        found += _spans_of(form, spec, gpu, first, last)
    return tuple(found)


def _spans_of(form: LayerForm, spec: Any, gpu: Gpu, first: int, last: int) -> Iterator[PathSpan]:
    def path_at(tokens: int) -> Path[Any] | None:
        return first_path(form.paths, form.at(spec, tokens), gpu)

    begins = [first]
    path = path_at(first)
    before = first
    for size in sizes(first, last):
        other = path_at(size)
        if other is not path:
            # The last size that still has the old path is between the two.
            begins.append(_first_other(range(before, size + 1), path, path_at))
            path = other
        before = size
    for begin, end in zip(begins, [*(later - 1 for later in begins[1:]), last], strict=True):
        picked = pick(form.paths, form.at(spec, begin), gpu)
        yield PathSpan(form.name, begin, end, picked.path.name if picked.path else None, picked.rejected)


def _first_other(between: range, path: Path[Any] | None, path_at: Callable[[int], Path[Any] | None]) -> int:
    return between[bisect_left(between, True, key=lambda tokens: path_at(tokens) is not path)]


def sizes(first: int, last: int) -> list[int]:
    """The numbers of tokens that are asked between the two."""
    found = set(range(first, min(last, EVERY_SIZE_TO) + 1)) | {last}
    octave = EVERY_SIZE_TO
    while octave < last:
        found |= {octave + octave * part // 8 for part in range(8)}
        octave *= 2
    return sorted(size for size in found if first <= size <= last)
