"""The engine on a real GPU: what of greedy output depends on company, chunks, pages, the prefix cache and graphs.

Steps that run the same kernels on the same sizes give the same bits: graphs and single launches, and steps that run
ahead of their tokens or wait for them. Everything else may change the order of sums, or the kernel, by roundings to
bf16. There the tokens must be the same up to a place where two tokens nearly tie; what is near follows from what plain
bf16 arithmetic does to the logits of this model. Every token goes to all experts: one that a rounding sends to another
expert would have another answer, and not a less exact one.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from microscale.engine.config import EngineConfig
from microscale.engine.engine import Engine
from microscale.engine.limits import SHORT_CONTEXT, Limits
from microscale.engine.loading.build import assemble
from microscale.engine.output import Scored
from microscale.engine.request import Request
from microscale.engine.runner import Model
from microscale.engine.sampling_params import SamplingParams
from microscale.kernels.dense import dequantized, unpack
from microscale.kernels.small import norms
from microscale.models.config import LayerKind
from microscale.models.families import AnyModel
from support.forward import all_logits
from support.greedy import near_tie
from support.loading import load_model
from support.model_noise import model_noise

SHAPE = {"num_hidden_layers": 4, "num_local_experts": 4, "vocab_size": 4096}
MANY_EXPERTS = {**SHAPE, "num_local_experts": 16}
pytestmark = pytest.mark.starts("gpt-oss-20b", SHAPE)
NEW = 48


def load(
    page_size: int = 16, dtype: str = "auto", backend: str | None = None, shape: dict[str, int] = SHAPE
) -> AnyModel:
    return load_model(
        EngineConfig(
            "gpt-oss-20b",
            load_format="dummy",
            device="cuda",
            dtype=dtype,
            backend=backend,
            hf_overrides=dict(shape),
            block_size=page_size,
        )
    )


@pytest.fixture(scope="module")
def near() -> float:
    """Log-probability between the two tokens where outputs may part."""
    references = [load(dtype=dtype, backend="reference") for dtype in ("float32", "bfloat16")]
    exact, plain = (torch.cat(all_logits(model, prompts(), 512)) for model in references)
    noise = float((plain - exact).square().mean().sqrt())
    assert noise <= 2 * model_noise(SHAPE["num_hidden_layers"]) * float(exact.square().mean().sqrt())
    return near_tie(plain, exact)


@pytest.fixture(scope="module")
def models() -> dict[int, Model]:
    return {16: load(16), 64: load(64)}


def prompts() -> list[list[int]]:
    chooser = random.Random(0)
    shared = [chooser.randrange(4096) for _ in range(200)]
    own = [[chooser.randrange(4096) for _ in range(length)] for length in (1, 7, 33, 150, 400)]
    return [*own, shared + own[0], shared + own[1], shared]


Tokens = list[list[tuple[int, float, float]]]
"""For each prompt: tokens, their log-probabilities, and those of the next likeliest."""


def run(
    model: Model,
    asked: list[list[int]] | None = None,
    *,
    full: int = 4096,
    eager: bool = False,
    fill: bool | None = None,
    run_ahead: bool = True,
    stand_ins: bool = False,
    **limits: object,
) -> Tokens:
    """``stand_ins``: as in a server, whose steps run in larger graphs until their own are captured."""
    asked = prompts() if asked is None else asked
    numbers = {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1024} | limits
    sizes = Limits(page_size=model.page_size, window=model.config.sliding_window, **numbers)  # type: ignore[arg-type]
    pages = {LayerKind.FULL: full // model.page_size, LayerKind.SLIDING: 4096 // model.page_size}
    engine: Engine = assemble(model, sizes, pages, enforce_eager=eager, fill_up_prompts=fill)
    engine.run_ahead = run_ahead
    if stand_ins:
        engine.prepare(stand_ins=True)
    found: Tokens = [[] for _ in asked]
    for index, prompt in enumerate(asked):
        engine.submit(Request(str(index), prompt, SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=2)))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            assert output.token is not None
            (_, _), (_, second) = output.top_logprobs
            assert output.logprob is not None
            found[int(output.request_id)].append((output.token, output.logprob, second))
        engine.check()
    if stand_ins:
        stats = engine.stats()
        assert stats.graph_stand_ins > 0
        assert stats.graphs_waited_for == 0
        while engine.idle():
            pass
        assert engine.stats().graphs > stats.graphs
    return found


def tokens(found: Tokens) -> list[list[int]]:
    return [[token for token, _, _ in one] for one in found]


def same_or_tied(found: Tokens, alone: Tokens) -> tuple[int, float]:
    """How many outputs are the same in full, and the widest tie at which one parted."""
    same, widest = 0, 0.0
    for mine, other in zip(found, alone, strict=True):
        parted = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a[0] != b[0]), None)
        if parted is None:
            same += 1
        else:
            widest = max(widest, other[parted][1] - other[parted][2])
    return same, widest


@pytest.mark.starts("gpt-oss-20b", MANY_EXPERTS)
def test_graphs_and_running_ahead_change_no_bit() -> None:
    model = load(shape=MANY_EXPERTS)
    graphs = run(model)
    assert run(model) == graphs
    assert run(model, eager=True) == graphs
    assert run(model, run_ahead=False) == graphs


@pytest.fixture
def one_cublas_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS takes a kernel by the number of rows, and each adds in an order of its own. Here it always has 512."""

    def padded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(F.pad(x, (0, 0, 0, 512 - len(x))), weight, bias)[: len(x)]

    for module in (dequantized, unpack, norms):
        monkeypatch.setattr(module, "linear", padded)


@pytest.mark.usefixtures("one_cublas_kernel")
def test_prompts_alone_give_the_same_bits_filled_up_and_as_they_are(models: dict[int, Model]) -> None:
    """Every size of a chunk around the edges of buckets; a prompt twice, so that the second time is a graph."""
    chooser = random.Random(2)
    lengths = (2, 3, 5, 16, 17, 18, 19, 31, 32, 33, 63, 64, 65, 66, 100, 129, 180, 185, 186, 257, 361, 362, 500, 512)
    asked = [[chooser.randrange(4096) for _ in range(length)] for length in lengths for _ in range(3)]
    filled = run(models[16], asked, max_num_seqs=1, prefix_caching=False)
    assert filled == run(models[16], asked, max_num_seqs=1, prefix_caching=False, fill=False)


@pytest.mark.usefixtures("one_cublas_kernel")
def test_a_prompt_alone_gives_the_same_bits_in_a_stand_in(models: dict[int, Model]) -> None:
    """As in a graph of its own."""
    chooser = random.Random(3)
    lengths = (17, 18, 31, 33, 50, 63, 65, 100, 129, 180, 185, 257, 362, 500)
    asked = [[chooser.randrange(4096) for _ in range(length)] for length in lengths] * 6
    expected = run(models[16], asked, max_num_seqs=1, prefix_caching=False)
    assert run(models[16], asked, max_num_seqs=1, prefix_caching=False, stand_ins=True) == expected


def test_greedy_output_does_not_depend_on_company(models: dict[int, Model], near: float) -> None:
    alone = run(models[16], max_num_seqs=1, prefix_caching=False)
    others = {
        "company": run(models[16], prefix_caching=False),
        "prefix cache": run(models[16]),
        "stand-ins": run(models[16], prefix_caching=False, stand_ins=True),
        "prompts as they are": run(models[16], prefix_caching=False, fill=False),
        "chunks of 64": run(models[16], max_num_batched_tokens=64),
        "pages of 64": run(models[64]),
        "preemption": run(models[16], full=1400),
    }
    for name, found in others.items():
        same, widest = same_or_tied(found, alone)
        print(f"{name}: {same} of {len(alone)} the same in {NEW} tokens, widest tie {widest:.3f} of {near:.3f}")
        assert widest < near


def test_a_context_that_outgrows_the_graphs_for_short_ones(models: dict[int, Model], near: float) -> None:
    """Two sequences pass ``SHORT_CONTEXT`` at different steps while a third stays short."""
    chooser = random.Random(1)
    asked = [[chooser.randrange(4096) for _ in range(SHORT_CONTEXT - before)] for before in (9, 30, 1500)]
    graphs = run(models[16], asked, full=8192, max_model_len=4096)
    assert run(models[16], asked, full=8192, max_model_len=4096, eager=True) == graphs
    for index, prompt in enumerate(asked):
        alone = run(models[16], [prompt], full=8192, max_model_len=4096)
        same, widest = same_or_tied([graphs[index]], alone)
        assert same or widest < near


def test_a_prompts_log_probabilities_are_those_of_decoding_it(models: dict[int, Model], near: float) -> None:
    """The same tokens, once as an output and once as a prompt in chunks: other kernels, and the same distribution."""
    prompt = prompts()[3]
    [said] = run(models[16], [prompt])
    whole = prompt + [token for token, _, _ in said]
    sizes = Limits(16, models[16].config.sliding_window, 8, 64, 1024)
    engine = assemble(models[16], sizes, {LayerKind.FULL: 256, LayerKind.SLIDING: 256})
    engine.submit(Request("scored", whole, SamplingParams(max_tokens=0, prompt_logprobs=2)))
    scored: list[Scored] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            assert output.token is None
            scored += output.prompt_logprobs
    assert [token for token, _, _ in scored] == whole[1:]
    for (token, logprob, second), (_, again, top) in zip(said, scored[-len(said) :], strict=True):
        assert abs(again - logprob) < near
        assert token in {other for other, _ in top} or logprob - second < near
