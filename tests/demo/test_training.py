"""Training at a small scale on a CPU: it learns, resumes exactly, and what it exports is what it trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from demo import attention
from demo.export import export, load_exported, parameters
from demo.model import Model, Options
from demo.optimizer import orthogonal
from demo.shape import SHAPE, TINY
from demo.train import Schedule, Trainer, arguments, distance, gradients
from microscale.engine.config import EngineConfig
from microscale.models.checkpoint import Checkpoint
from microscale.models.gpt_oss.model import GptOss
from microscale_lab.quality.tasks import DEMO_FOLDER
from support.forward import all_logits
from support.loading import load_model
from support.truth import load_transformers

LIMIT = 24 << 20


def trainer(run: Path, steps: int, minutes: float = 5.0) -> Trainer:
    words = f"--run {run} --tokenizer {DEMO_FOLDER} --shape tiny --device cpu --steps {steps} --minutes {minutes}"
    return Trainer(
        arguments(f"{words} --rows 4 --length 256 --rows-per-shard 32 --evaluate 0 --log-every 1000".split())
    )


def test_it_learns_and_resumes_exactly(tmp_path: Path) -> None:
    whole, half = trainer(tmp_path / "a", 8), trainer(tmp_path / "b", 8)
    whole.asked.log_every = 1
    losses = [whole.step()["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    for _ in range(4):
        half.step()
    half.save()
    rest = trainer(tmp_path / "b", 8)
    assert (rest.step_idx, rest.feed.position) == (4, 16)
    for _ in range(4):
        rest.step()
    for (name, mine), theirs in zip(whole.model.named_parameters(), rest.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_call_ends_with_its_time_and_the_training_with_its_steps(tmp_path: Path) -> None:
    early = trainer(tmp_path, 3, minutes=0.0)
    early.run()
    assert early.step_idx == 0
    done = trainer(tmp_path, 3)
    done.asked.export = tmp_path / "out"
    done.run()
    assert done.step_idx == 3
    assert Checkpoint(tmp_path / "out")
    assert trainer(tmp_path, 3).step_idx == 3


def test_the_learning_rate_rises_stays_and_ends_at_zero() -> None:
    by_time, by_steps = Schedule(None, 1000.0), Schedule(100, 1.0)
    assert by_time.progress(5, 250.0) == by_steps.progress(25, 9.0) == 0.25
    assert Schedule.factor(0.0) < 0.1
    assert Schedule.factor(0.2) == 1.0
    assert Schedule.factor(1.0) == 0.0


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    torch.manual_seed(1)
    model = Model(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # biases and sinks off zero
    folder = tmp_path_factory.mktemp("demo") / "model"
    export(model, folder, DEMO_FOLDER)
    return model, folder


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    # Longer than the window of 128.
    return [torch.randint(0, TINY.vocab_size, (length,), generator=generator).tolist() for length in (200, 31)]


def own_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]), torch.zeros(1, len(tokens), dtype=torch.int32))[0][0]
    return logits


def test_the_engine_and_transformers_compute_what_was_trained(exported: tuple[Model, Path]) -> None:
    model, folder = exported
    loaded = load_model(EngineConfig(str(folder), device="cpu", dtype="float32"))
    assert isinstance(loaded, GptOss)
    ours = all_logits(loaded, sequences(), 1000)
    truth = load_transformers(folder)
    for tokens, engine in zip(sequences(), ours, strict=True):
        mine = own_logits(model, tokens)
        with torch.inference_mode():
            theirs = truth(torch.tensor([tokens]), use_cache=False).logits[0]
        size = mine.max() - mine.min()
        assert (engine - mine).abs().max() / size < 2e-4
        assert (theirs - mine).abs().max() / size < 2e-4
        assert engine.argmax(-1).tolist() == theirs.argmax(-1).tolist()


def test_the_exported_weights_are_those_of_the_forward_pass(exported: tuple[Model, Path]) -> None:
    """Rounding is in the loop: loading what was rounded changes no logit."""
    model, folder = exported
    again = Model(TINY)
    load_exported(again, folder)
    tokens = sequences()[0]
    assert torch.equal(own_logits(model, tokens), own_logits(again, tokens))
    changed = [
        name for (name, a), (_, b) in zip(parameters(model), parameters(again), strict=True) if not torch.equal(a, b)
    ]
    assert any(name.endswith("gate_up_proj") for name in changed)


def test_documents_do_not_see_each_other(exported: tuple[Model, Path]) -> None:
    model, _ = exported
    first, second = sequences()
    row = torch.tensor([first + second])
    documents = torch.tensor([[0] * len(first) + [1] * len(second)], dtype=torch.int32)
    with torch.no_grad():
        packed = model(row, documents)[0][0]
    torch.testing.assert_close(packed[len(first) :], own_logits(model, second), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_fast_paths_equal_plain_ones(exported: tuple[Model, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Flex attention is compiled on a GPU; here its own eager form stands for it."""
    monkeypatch.setattr(attention, "_flex", lambda: flex_attention)
    monkeypatch.setattr(attention, "_block_mask", lambda: create_block_mask)
    model, _ = exported
    tokens = sequences()[0]
    plain = own_logits(model, tokens)
    try:
        for options in (Options(attention="flex"), Options(experts="grouped")):
            model.options = options
            torch.testing.assert_close(own_logits(model, tokens), plain, rtol=1e-4, atol=1e-4)
        # Flex attention has no gradient on a CPU; the grouped product has.
        asked = arguments(["--run", ".", "--tokenizer", ".", "--device", "cpu", "--rows", "2", "--length", "64"])
        assert distance(gradients(model, Options(experts="grouped"), asked), gradients(model, Options(), asked)) < 1e-5
    finally:
        model.options = Options()


def test_muon_makes_singular_values_equal() -> None:
    matrices = torch.randn(3, 64, 32, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonal(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_real_shape_fits_its_limit(tmp_path: Path) -> None:
    export(Model(SHAPE), tmp_path, DEMO_FOLDER)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert sum(sizes) + (DEMO_FOLDER / "tasks.jsonl.gz").stat().st_size <= LIMIT
    assert max(sizes) <= 16 << 20
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
