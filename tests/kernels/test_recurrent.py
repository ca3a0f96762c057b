"""The recurrent op: the reference is what transformers computes, however tokens are divided among steps; Triton is held
against it under the interpreter."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet

from microscale import hardware
from microscale.kernels.op import Activations
from microscale.kernels.recurrent.gated_delta import TritonRecurrent
from microscale.kernels.recurrent.reference import recurrent
from microscale.kernels.recurrent.spec import RecurrentWeights, StateCache, StepShape
from microscale.planning.paths import PathList, path_of
from microscale_lab.cases.recurrent import QWEN36, TINY, make_batch, make_cache, make_tokens, make_weights, spec_of
from support.interpreter import run_cases, thirds_and_all


@pytest.mark.slow
@thirds_and_all
def test_triton_under_the_interpreter(which: str) -> None:
    run_cases("cases_recurrent.py", which, beside=__file__)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"key_dim": 48, "value_dim": 48}, "48"),
        ({"key_dim": 64}, "64 and 128"),
        ({"taps": 6}, "not 6"),
        ({"num_key_heads": 3}, "32 over 3"),
        ({"activations": Activations.MXFP8}, "mxfp8"),
        ({"step": StepShape(1, 6, verify=True)}, "5 drafts"),
    ],
)
def test_triton_refuses_with_a_reason(change: dict[str, Any], word: str) -> None:
    assert TritonRecurrent().supports(QWEN36, hardware.known("rtx5090")) is None
    assert word in (TritonRecurrent().supports(replace(QWEN36, **change), hardware.known("rtx5090")) or "")
    assert "CPU" in (TritonRecurrent().supports(QWEN36, hardware.cpu()) or "")


def test_the_path_follows_from_the_step() -> None:
    entry, gpu = TritonRecurrent(), hardware.known("h200")
    shapes = StepShape(64, 1), StepShape(64, 4, verify=True), StepShape(1, 6), StepShape(2, 6)
    specs = [replace(QWEN36, step=shape) for shape in shapes]
    names = [path_of(entry, PathList.RUN, spec, gpu).name for spec in specs]
    assert names == ["token by token", "token by token", "chunks", "chunks, others token by token"]
    assert [entry.cost(spec, gpu).launches for spec in specs] == [1, 1, 4, 5]


def run(
    tokens: tuple[torch.Tensor, torch.Tensor], weights: RecurrentWeights, cache: StateCache, first: int, read: int = 0,
    write: int = 0,
) -> torch.Tensor:  # fmt: skip
    """One sequence alone."""
    count = tokens[0].shape[0]
    batch = make_batch([first], [count], [read], [[write]])
    return recurrent(*tokens, weights, cache, batch, spec_of(TINY, batch, count))


def test_a_layer_of_transformers() -> None:
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        hidden_size=128,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_hidden_layers=4,
    )
    layer = Qwen3_5MoeGatedDeltaNet(config, 0).float().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(1, 150, 128)
    with torch.no_grad():
        want = layer(x)[0]
        projected = torch.cat((layer.in_proj_qkv(x), layer.in_proj_z(x)), -1)[0]
        gates = torch.cat((layer.in_proj_b.weight, layer.in_proj_a.weight))
        conv, decay = layer.conv1d.weight[:, 0], -layer.A_log.exp()
        weights = RecurrentWeights(gates, conv, decay, layer.dt_bias, layer.norm.weight, config.rms_norm_eps)
        found = layer.out_proj(run((projected, x[0]), weights, make_cache(TINY, 1), 0))
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_any_size_give_the_same(seed: int) -> None:
    """A sequence alone and at once, against the same in steps next to another one, from slot to slot."""
    chance = random.Random(seed)
    weights, cache = make_weights(TINY), make_cache(TINY, 6, seed)
    first_tokens, second_tokens = make_tokens(TINY, 23, seed), make_tokens(TINY, 23, seed + 50)
    want = [run(tokens, weights, make_cache(TINY, 1), 0) for tokens in (first_tokens, second_tokens)]
    at, slots, found = [0, 0], [0, 1], [torch.empty_like(each) for each in want]
    while min(at) < 23:
        counts = [min(chance.choice([0, 1, 1, 2, 5]), 23 - begin) for begin in at]
        if not sum(counts):
            continue
        free = [slot for slot in range(6) if slot not in slots]
        write = [chance.choice([own, free[number]]) for number, own in enumerate(slots)]
        batch = make_batch(at, counts, slots, [[to] for to in write])
        parts = [
            tuple(each[begin : begin + count] for each in tokens)
            for tokens, begin, count in zip((first_tokens, second_tokens), at, counts, strict=True)
        ]
        projected, x = (torch.cat(both) for both in zip(*parts, strict=True))
        before = cache.state.clone()
        out = recurrent(projected, x, weights, cache, batch, spec_of(TINY, batch, sum(counts)))
        for number, rows in enumerate(out.split(counts)):
            found[number][at[number] : at[number] + counts[number]] = rows
            if counts[number]:
                slots[number] = write[number]
                at[number] += counts[number]
        others = [slot for slot in range(6) if slot not in slots]
        assert torch.equal(cache.state[others], before[others])
    for each, expected in zip(found, want, strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_the_state_after_drafts_is_that_of_what_was_accepted(accepted: int) -> None:
    """Three drafts: the next step begins in the slot after the last that was right, also where that is the one that
    the drafts were read from."""
    weights, tokens = make_weights(TINY), make_tokens(TINY, 10)
    plain = make_cache(TINY, 1)
    want = run(tokens, weights, plain, 0)
    cache = make_cache(TINY, 4)
    run(tuple(each[:4] for each in tokens), weights, cache, 0, 2, 2)  # type: ignore[arg-type]
    wrong = make_tokens(TINY, 4, seed=9)
    drafted = [
        torch.cat((right[4 : 5 + accepted], other[1 + accepted :])) for right, other in zip(tokens, wrong, strict=True)
    ]
    slots = [2, 0, 1, 3]
    batch = make_batch([4], [4], [2], [slots], verify=True)
    out = recurrent(drafted[0], drafted[1], weights, cache, batch, spec_of(TINY, batch, 4))
    torch.testing.assert_close(out[: 1 + accepted], want[4 : 5 + accepted], rtol=1e-5, atol=1e-5)
    rest = tuple(each[5 + accepted :] for each in tokens)
    found = run(rest, weights, cache, 5 + accepted, slots[accepted], slots[accepted])  # type: ignore[arg-type]
    torch.testing.assert_close(found, want[5 + accepted :], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache.state[slots[accepted]], plain.state[0], rtol=1e-5, atol=1e-5)
