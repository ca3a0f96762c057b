"""The embedded model's draft head at a small scale: what is trained is what is drafted, it learns, and it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.acceptance import Tally, load_head, replay
from demo.draft_head import DraftHead, Guesses, Lesson, acceptance
from demo.export import export
from demo.export_head import export_head
from demo.model import Model
from demo.shape import SHAPE, TINY
from demo.train_head import HeadTrainer, arguments, shape_for
from microscale.engine.config import EngineConfig
from microscale.models.config import LayerKind
from microscale.models.draft_heads.drafting import Verified
from microscale.models.draft_heads.eagle3 import Eagle3
from microscale.models.draft_heads.layer import Steps
from microscale.models.families import AnyModel
from microscale_lab.batches import SequenceChunk, build_batch
from microscale_lab.quality.tasks import DEMO_FOLDER
from support.loading import load_model

LIMIT = 4 << 20
GUESSES = 4
FULL = LayerKind.FULL


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("target") / "model"
    export(Model(TINY), folder, DEMO_FOLDER)
    return folder


def trainer(run: Path, target: Path, steps: int) -> HeadTrainer:
    words = f"--run {run} --target {target} --device cpu --steps {steps} --minutes 5 --taps 1 2 --intermediate 64"
    more = f"--guesses {GUESSES} --draft-vocab 512 --rows 3 --length 128 --rows-per-shard 80 --log-every 1000"
    return HeadTrainer(arguments(f"{words} {more}".split()))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> tuple[HeadTrainer, Path, list[float]]:
    """After a few steps, and the losses of each."""
    torch.manual_seed(2)
    run = trainer(tmp_path_factory.mktemp("head"), target_folder, 12)
    losses = [float(run.step()[0].loss.detach()) for _ in range(12)]
    folder = tmp_path_factory.mktemp("exported")
    export_head(run.head, folder)
    return run, folder, losses


@pytest.fixture(scope="module")
def loaded(target_folder: Path, trained: tuple[HeadTrainer, Path, list[float]]) -> tuple[AnyModel, Eagle3]:
    model = load_model(EngineConfig(str(target_folder), device="cpu", dtype="float32"))
    head = load_head(trained[1], model)
    assert isinstance(head, Eagle3)
    return model, head


def test_it_learns(trained: tuple[HeadTrainer, Path, list[float]]) -> None:
    losses = trained[2]
    assert sum(losses[-3:]) / 3 < 0.9 * losses[0]


def chained(head: Eagle3, lesson: Lesson, row: int, origin: int) -> list[Tensor]:
    """The logits of the engine's head: the rows up to an origin, then its guesses, each after the document's token."""
    tokens = lesson.tokens[row].tolist()
    kv = head.new_cache(16)
    rows = SequenceChunk(tokens[1 : origin + 2], 0, dict.fromkeys(LayerKind, range(16)), 1)
    verified = Verified(build_batch([rows], head.page_size, head.device), lesson.tapped[row, : origin + 1])
    logits, hidden = head.forward(verified.batch, kv, head.combine(verified.tapped))
    found = [logits.values[0]]
    steps = Steps(verified.last.attention[FULL], GUESSES - 1, head.page_size)
    for step in range(GUESSES - 1):
        token = torch.tensor([tokens[origin + 2 + step]])
        logits, hidden = head.forward(steps.batch(step, token), kv, hidden)
        found.append(logits.values[0])
    return found


def test_what_is_drafted_is_what_was_trained(
    trained: tuple[HeadTrainer, Path, list[float]], loaded: tuple[AnyModel, Eagle3]
) -> None:
    """Every guess of an origin, in training all at once and with the engine's head one after the other."""
    run, head = trained[0], loaded[1]
    with torch.no_grad():
        lesson = run.lesson()
        lengths = (lesson.documents[0] == lesson.documents[0, 0]).sum()
        together = run.head.chain(lesson, GUESSES)
    for origin in (0, 7, int(lengths) - GUESSES - 2):
        for step, logits in enumerate(chained(head, lesson, 0, origin)):
            theirs = together[step][0, origin]
            assert float((logits - theirs).abs().max() / (theirs.max() - theirs.min())) < 2e-4, (origin, step)


def test_taps_are_the_engines(trained: tuple[HeadTrainer, Path, list[float]], loaded: tuple[AnyModel, Eagle3]) -> None:
    assert loaded[1].config == trained[0].head.config
    assert loaded[1].config.reads.taps == (1, 2)


def test_it_resumes_exactly(tmp_path: Path, target_folder: Path) -> None:
    whole, half = trainer(tmp_path / "a", target_folder, 4), trainer(tmp_path / "b", target_folder, 4)
    for _ in range(2):
        whole.step()
        half.step()
    half.save()
    rest = trainer(tmp_path / "b", target_folder, 4)
    assert (rest.step_idx, rest.feed.position) == (2, half.feed.position)
    whole.step()
    rest.step()
    for (name, mine), theirs in zip(whole.head.named_parameters(), rest.head.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_acceptance_counts_guesses_until_the_first_wrong_one() -> None:
    def guess(right: list[int], counts: list[int]) -> Guesses:
        return Guesses(torch.zeros(()), torch.tensor([right]) > 0, torch.tensor([counts]) > 0)

    found = [guess([1, 1, 0, 1], [1, 1, 1, 1]), guess([1, 0, 1, 1], [1, 1, 1, 0])]
    rates, length = acceptance(found)  # the last origin has only one guess
    assert rates == [2 / 3, 1 / 2]
    assert length == 1 + 3 / 3


def test_a_replay_steps_as_greedy_decoding_would(loaded: tuple[AnyModel, Eagle3]) -> None:
    """A head that is always right, and one that never is, in the place of the trained one."""
    model, head = loaded
    prompt, answer = list(range(20, 40)), list(range(100, 121))
    tokens = prompt + answer
    taught = {position: tokens[position + 2 :] for position in range(len(tokens))}

    class Known(Eagle3):
        def __init__(self, right: bool) -> None:
            self.__dict__.update(head.__dict__)
            self.right = right

        def draft(self, verified: Verified, kv: object, count: int) -> Tensor:
            following = taught[int(verified.batch.positions[-1])][:count]
            return torch.tensor([following if self.right else [0] * count])

    assert replay(model, Known(right=True), prompt, answer, 3) == {3: 5}
    never = Tally(3, replay(model, Known(right=False), prompt, answer, 3))
    assert never.steps == {0: 18}
    assert (never.tokens_a_step, never.rates) == (1.0, [0.0, 0.0, 0.0])


def test_the_real_shape_fits_its_limit(tmp_path: Path) -> None:
    asked = arguments(["--run", ".", "--target", "."])
    config = shape_for(SHAPE, asked)
    head = DraftHead(config, Model(SHAPE), torch.arange(asked.draft_vocab), torch.ones(3))
    export_head(head, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= LIMIT
