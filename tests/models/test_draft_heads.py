"""Draft heads in each published layout against plain torch: the same guesses, over a chain of them, with paged KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.formats import block_format, decode, encode
from microscale.models.batch import KvCache
from microscale.models.config import OWN_FORMATS, HeadFormats, LayerKind
from microscale.models.draft_heads.config_file import open_draft_head
from microscale.models.draft_heads.dflash import DFlash
from microscale.models.draft_heads.drafting import DraftHead, TargetEnds, Verified
from microscale.models.draft_heads.eagle3 import Eagle3
from microscale.models.draft_heads.heads import bind_head
from microscale.models.families import AnyModel
from microscale.models.taps import Taps
from microscale.planning.ops import Activations, Embedding, Ops, Preference
from microscale_lab.batches import SequenceChunk, build_batch
from microscale_lab.heads import ops_for_head
from support.forward import poison
from support.loading import load_model
from support.tiny_checkpoints import write_hf
from support.tiny_heads import BLOCK, EAGLE3, HEADS, TARGET, Maker, PlainDFlash, PlainEagle3, plain_head

LENGTHS = (1, 19, 33)
DRAFTS = 5
CPU = torch.device("cpu")


@dataclass
class Target:
    """The tiny target, and one of its tensors' files."""

    model: AnyModel
    embed: Tensor
    lm_head: Tensor

    @property
    def ends(self) -> TargetEnds:
        return TargetEnds(self.model.embed, self.model.lm_head)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_hf(tmp_path_factory.mktemp("target") / "target", TARGET, seed=7)
    tensors = load_file(folder / "model.safetensors")
    model = load_model(EngineConfig(str(folder), device="cpu", dtype="float32"))
    return Target(model, tensors["model.embed_tokens.weight"], tensors["lm_head.weight"])


@cache
def sequences() -> list[list[int]]:
    """Prompts, and the tokens that the target is taken to have chosen after them."""
    draws = torch.Generator().manual_seed(11)
    return [torch.randint(0, TARGET.vocab_size, (n + 8,), generator=draws).tolist() for n in LENGTHS]


def tapped_of(model: AnyModel, tokens: list[int], places: tuple[int, ...]) -> Tensor:
    """The target's taps of a whole sequence."""
    pages = list(range(-(-len(tokens) // model.page_size)))
    chunk = SequenceChunk(tokens, 0, dict.fromkeys(LayerKind, pages), 0)
    taps = Taps.empty(places, len(tokens), TARGET.hidden, torch.float32, CPU)
    kv = model.new_cache(dict.fromkeys(LayerKind, len(pages)))
    model.forward(build_batch([chunk], model.page_size, CPU), kv, taps)
    return taps.rows


def load(folder: Path, target: Target, page_size: int = 16, formats: HeadFormats = OWN_FORMATS) -> DraftHead:
    ops = ops_for_head(Ops(hardware.cpu(), Activations.FLOAT32, Preference()), formats)
    return bind_head(open_draft_head(folder, target.model.config), ops, CPU, page_size, target.ends)


def held(tensors: Mapping[str, Tensor], formats: HeadFormats) -> dict[str, Tensor]:
    """The published tensors as they are read from the formats in which the head is held. Blocks lie along the columns,
    so parts of a layer are rounded as the whole is."""

    def rounded(name: str, tensor: Tensor) -> Tensor:
        named = name == "lm_head.weight" and formats.lm_head is not None
        fmt = formats.lm_head if named else formats.quantization
        if fmt is None or tensor.ndim != 2 or name == "embed_tokens.weight":
            return tensor
        if not named and (tensor.shape[0] % 16 or tensor.shape[1] % 32):
            return tensor
        return decode(encode(tensor.float(), block_format(fmt)))

    return {name: rounded(name, tensor) for name, tensor in tensors.items()}


class Case:
    """One head, ours and plain, over the same sequences."""

    def __init__(
        self, name: str, target: Target, folder: Path, page_size: int = 16, formats: HeadFormats = OWN_FORMATS
    ) -> None:
        published = HEADS[name]
        self.head = load(published.write(folder), target, page_size, formats)
        self.taps = published.taps
        tensors = held(published.tensors, formats)
        self.plain: PlainEagle3 | PlainDFlash = plain_head(name, tensors, target.embed, target.lm_head)
        self.tapped = [tapped_of(target.model, tokens, self.taps) for tokens in sequences()]
        count = -(-(max(map(len, sequences())) + DRAFTS) // page_size)
        self.pages = [[3 * page + i for page in range(count)] for i in range(3)]
        self.kv: KvCache = poison(self.head.new_cache(3 * count + 1))
        self.nobody = 3 * count * page_size

    def feed(self, spans: Sequence[tuple[int, int]], drafts: int, *, rejected: int = 0) -> Tensor:
        """Rows of each sequence, first to last; guesses after them, if any are wanted. ``rejected`` rows of a draft
        stand behind them and are not certain."""
        chunks, tapped = [], []
        for i, (first, end) in enumerate(spans):
            tokens = sequences()[i][first + 1 : end + 1 + rejected]
            chunks.append(SequenceChunk(tokens, first, dict.fromkeys(LayerKind, self.pages[i]), 1 if drafts else 0))
            tapped.append(self.tapped[i][first : end + rejected])
        batch = build_batch(chunks, self.head.page_size, CPU)
        if rejected:
            ends = torch.tensor([len(chunk.token_ids) for chunk in chunks]).cumsum(0)
            slots, junk = batch.slots[LayerKind.FULL].clone(), (ends[:, None] - 1 - torch.arange(rejected)).flatten()
            slots[junk] = self.nobody
            assert batch.logits is not None
            of_last = batch.logits.attention[LayerKind.FULL]
            of_last = replace(of_last, context_lens=of_last.context_lens - rejected)
            last = replace(batch.logits, rows=ends - 1 - rejected, attention={LayerKind.FULL: of_last})
            batch = replace(batch, slots={LayerKind.FULL: slots}, logits=last)
        return self.head.draft(Verified(batch, torch.cat(tapped)), self.kv, drafts)

    def expected(self, ends: Sequence[int], drafts: int) -> list[list[int]]:
        return [
            self.plain.guess(tokens[1 : end + 1], tapped[:end], drafts)[0]
            for tokens, tapped, end in zip(sequences(), self.tapped, ends, strict=True)
        ]


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize(("page_size", "chunk"), [(16, 1000), (1, 1000), (5, 7)])
def test_guesses_are_those_of_plain_torch(
    target: Target, tmp_path: Path, name: str, page_size: int, chunk: int
) -> None:
    """Prompts of unequal lengths, whole or in chunks, of which only the last is guessed after."""
    case = Case(name, target, tmp_path, page_size)
    *before, last = range(0, max(LENGTHS), chunk)
    for start in before:
        case.feed([(min(start, n - 1), min(start + chunk, n - 1)) for n in LENGTHS], 0)
    spans = [(min(last, n - 1), n) for n in LENGTHS]
    assert case.feed(spans, DRAFTS).tolist() == case.expected(LENGTHS, DRAFTS)


@pytest.mark.parametrize("name", HEADS)
def test_a_rejected_draft_leaves_no_trace(target: Target, tmp_path: Path, name: str) -> None:
    """Guess, go on with other tokens than were guessed, and guess again: rows of the draft are overwritten, and rows
    that are not certain lead to nobody's page."""
    case = Case(name, target, tmp_path)
    case.feed([(0, n) for n in LENGTHS], DRAFTS)
    found = case.feed([(n, n + 2) for n in LENGTHS], DRAFTS, rejected=2)
    assert found.tolist() == case.expected([n + 2 for n in LENGTHS], DRAFTS)
    found = case.feed([(n + 2, n + 3) for n in LENGTHS], DRAFTS)  # one row each: a step without drafts
    assert found.tolist() == case.expected([n + 3 for n in LENGTHS], DRAFTS)


@pytest.mark.parametrize("name", ["specforge", "nvidia_v3"])
def test_lm_head_may_be_mxfp8(target: Target, tmp_path: Path, name: str) -> None:
    case = Case(name, target, tmp_path, formats=HeadFormats(lm_head="mxfp8"))
    assert case.feed([(0, n) for n in LENGTHS], DRAFTS).tolist() == case.expected(LENGTHS, DRAFTS)
    assert case.head.ops.plan.of("dense", "lm_head")[0].spec.weight_format == "mxfp8"


def formats_of(head: DraftHead) -> dict[str, str]:
    plan = head.ops.plan
    return {layer: plan.of(op, layer)[0].spec.weight_format for op, layer in plan.layers() if op == "dense"}


ALL = HeadFormats("mxfp8")
LAYERS = {"fc", "qkv", "o", "mlp.gate_up", "mlp.down"}
WHOLE_LM_HEADS = {"specforge", "speculators"}
"""Of a multiple of 16 rows; others are 500 and 100, and the target's."""


@pytest.mark.parametrize("name", HEADS)
def test_all_weights_may_be_mxfp8(target: Target, tmp_path: Path, name: str) -> None:
    """Its guesses are those of a float head with the same rounded weights."""
    case = Case(name, target, tmp_path, formats=ALL)
    found = case.feed([(0, n) for n in LENGTHS], DRAFTS)
    assert found.tolist() == case.expected(LENGTHS, DRAFTS)
    narrow = LAYERS | ({"lm_head"} if name in WHOLE_LM_HEADS else set())
    formats = formats_of(case.head)
    assert {layer for layer, fmt in formats.items() if fmt == "mxfp8"} == narrow
    assert set(formats.values()) <= {"bf16", "mxfp8"}


@pytest.mark.parametrize("name", EAGLE3)
def test_logits_in_mxfp8_are_those_of_the_rounded_weights(target: Target, tmp_path: Path, name: str) -> None:
    narrow, wide = (Case(name, target, tmp_path / str(i), formats=each) for i, each in enumerate((ALL, OWN_FORMATS)))
    logits, states, their_logits, their_states = rows_of(narrow)
    assert away(logits, their_logits) <= 2e-5
    assert away(states, their_states) <= 2e-5
    assert away(logits, rows_of(wide)[2]) > 1e-3  # and of no others


def test_a_layer_that_does_not_fit_stays_bf16_and_the_plan_says_why(target: Target, tmp_path: Path) -> None:
    """13 tiles of 16 rows, but six and a half blocks of 32 columns."""
    published = HEADS["specforge"]
    keys = {**published.config, "intermediate_size": 208}
    other = replace(published, config=keys, tensors=Maker(6).eagle3(keys, "midlayer.", 3, 96))
    head = load(other.write(tmp_path), target, formats=ALL)
    assert {layer for layer, fmt in formats_of(head).items() if fmt == "bf16"} == {"mlp.down"}
    told = head.ops.plan.of("dense", "mlp.down")[0].to_json()["rejected"][0]
    assert told["name"] == "mxfp8"
    assert told["reason"] == "needs multiples of 16 rows and 32 columns, not 160 and 208; mlp.down stays bf16"


@pytest.mark.parametrize("name", HEADS)
def test_a_coded_embedding_changes_no_guess(
    target: Target, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kernel cannot look rows up, the lookup, both norms and their joining stand alone."""
    together, apart = (Case(name, target, tmp_path / part) for part in ("together", "apart"))
    found = together.feed([(0, n) for n in LENGTHS], DRAFTS)
    monkeypatch.setattr(Embedding, "table", None)
    assert apart.feed([(0, n) for n in LENGTHS], DRAFTS).tolist() == found.tolist()


def rows_of(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits and states of every row of the longest prompt, ours and then plain ones."""
    head, plain, rows = case.head, case.plain, LENGTHS[2]
    assert isinstance(head, Eagle3)
    assert isinstance(plain, PlainEagle3)
    tokens, tapped = sequences()[2][1 : rows + 1], case.tapped[2][:rows]
    chunk = SequenceChunk(tokens, 0, dict.fromkeys(LayerKind, case.pages[2]), rows)
    logits, states = head.forward(build_batch([chunk], 16, CPU), case.kv, head.combine(tapped))
    return logits.values, states, *plain.rows(torch.tensor(tokens), plain.combine(tapped))


def away(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


@pytest.mark.parametrize("name", EAGLE3)
def test_logits_and_states_are_those_of_plain_torch(target: Target, tmp_path: Path, name: str) -> None:
    logits, states, their_logits, their_states = rows_of(Case(name, target, tmp_path))
    assert away(logits, their_logits) <= 2e-5
    assert away(states, their_states) <= 2e-5


def test_logits_of_a_block_are_those_of_plain_torch(target: Target, tmp_path: Path) -> None:
    case = Case("dflash", target, tmp_path)
    head, plain, rows = case.head, case.plain, LENGTHS[2]
    assert isinstance(head, DFlash)
    assert isinstance(plain, PlainDFlash)
    tokens, tapped = sequences()[2][1 : rows + 1], case.tapped[2][:rows]
    chunk = SequenceChunk(tokens, 0, dict.fromkeys(LayerKind, case.pages[2]), 1)
    logits = head.forward(Verified(build_batch([chunk], 16, CPU), tapped), case.kv, DRAFTS)
    assert logits is not None
    assert away(logits.values, plain.guess(tokens, tapped, DRAFTS)[1]) <= 2e-5


@pytest.mark.parametrize(
    "change",
    [
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 4]},
        {"norm_before_residual": False},
        {"transformer_layer_config": {**HEADS["speculators"].layer_config, "rope_theta": 1e5}},
    ],
)
def test_another_reading_of_the_config_would_be_seen(target: Target, tmp_path: Path, change: dict[str, object]) -> None:
    """The comparison has teeth. Another tap is other numbers of the same shape; the rest is other arithmetic."""
    case = Case("speculators", target, tmp_path / "right")
    published = HEADS["speculators"]
    other = replace(published, config={**published.config, **change})
    case.head = load(other.write(tmp_path / "wrong"), target)
    case.tapped = [tapped_of(target.model, tokens, case.head.config.reads.taps) for tokens in sequences()]
    logits, *_ = rows_of(case)
    case.tapped = [tapped_of(target.model, tokens, published.taps) for tokens in sequences()]
    assert away(logits, rows_of(case)[2]) > 2e-3


def test_a_head_for_another_draft_length_needs_no_other_call(target: Target, tmp_path: Path) -> None:
    """A chain guesses as many as are asked for; a block guesses up to its size, and fewer are other guesses."""
    chain, block = Case("specforge", target, tmp_path / "a"), Case("dflash", target, tmp_path / "b")
    assert chain.head.config.most_drafts is None
    assert block.head.config.most_drafts == BLOCK - 1
    spans = [(0, n) for n in LENGTHS]
    for count in (1, 3):
        assert chain.feed(spans, count).tolist() == chain.expected(LENGTHS, count)
        assert block.feed(spans, count).tolist() == block.expected(LENGTHS, count)
    assert chain.feed(spans, 0).shape[1] == block.feed(spans, 0).shape[1] == 0
