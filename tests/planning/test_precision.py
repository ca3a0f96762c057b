"""Precision plans: what each holds in which format, what the user may change, and weights that change format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from microscale.errors import BadSetting, Unsupported
from microscale.formats import FORMATS, MXFP4, BlockScaled, decode, encode, encode_channels
from microscale.hardware import cpu
from microscale.kernels.dense.spec import DenseSpec, DenseWeights
from microscale.planning import quantise
from microscale.planning.ops import Activations, Ops, Preference
from microscale.planning.option_values import AUTO, LAYER_FORMATS, LAYERS, PRECISION_NAMES
from microscale.planning.precision import BITS, PRECISIONS, make_precision
from microscale.planning.quantise import convert, format_name, take_rows
from support.live_bytes import LiveBytes

BF16, MX = Activations.BF16, Activations.MXFP8


Accepted = tuple[Activations, ...]


@pytest.mark.parametrize(
    ("plan", "dense", "experts", "embed", "kv", "moe", "dense_activations"),
    [
        ("exact", "bf16", "mxfp4", "bf16", "bf16", (BF16,), (BF16,)),
        ("balanced", "mxfp8", "mxfp4", "bf16", "bf16", (BF16, MX), (BF16,)),
        ("fast", "mxfp4", "mxfp4", "bf16", "fp8", (BF16, MX), (BF16, MX)),
    ],
)
def test_what_the_plans_hold(
    plan: str, dense: str, experts: str, embed: str, kv: str, moe: Accepted, dense_activations: Accepted
) -> None:
    precision = PRECISIONS[plan]
    assert {precision.format_of(layer, "bf16") for layer in ("qkv", "o", "mlp.down", "lm_head")} == {dense}
    assert precision.format_of("experts", "mxfp4") == experts
    assert precision.format_of("embed", "bf16") == embed
    assert precision.format_of("router", "bf16") == "bf16"
    assert precision.kv_format == kv
    assert precision.activations("moe", BF16, "mxfp4") == moe
    assert precision.activations("dense", BF16, dense) == dense_activations
    assert precision.activations("moe", Activations.FLOAT32, "mxfp4") == (Activations.FLOAT32,)


def test_nvfp4_activations_are_for_nvfp4_weights() -> None:
    assert PRECISIONS["fast"].activations("moe", BF16, "nvfp4") == (BF16, Activations.NVFP4)
    assert PRECISIONS["fast"].activations("dense", BF16, "nvfp4") == (BF16, Activations.NVFP4)
    assert PRECISIONS["exact"].activations("moe", BF16, "nvfp4") == (BF16,)
    asked = make_precision("exact", (), "nvfp4")
    assert asked.activations("moe", BF16, "nvfp4") == (Activations.NVFP4,)
    assert asked.activations("dense", BF16, "nvfp4") == (BF16,)
    # A draft head's experts may be in another format, for which no kernel has such activations.
    assert asked.of_draft_head().activations("moe", BF16, "mxfp8") == (BF16,)


def test_a_plan_never_widens_and_the_user_may() -> None:
    assert PRECISIONS["balanced"].format_of("qkv", "mxfp4") == "mxfp4"
    assert PRECISIONS["fast"].format_of("qkv", "nvfp4") == "nvfp4"
    assert PRECISIONS["exact"].format_of("experts", "fp8_block") == "fp8_block"
    assert PRECISIONS["balanced"].format_of("experts", "fp8_block") == "fp8_block"
    assert make_precision("balanced", ["qkv=bf16"]).format_of("qkv.full", "mxfp8") == "bf16"


def test_the_users_choices_go_before_the_plan() -> None:
    precision = make_precision("fast", ["lm_head=mxfp8", "embed=fp8"], "bf16", "bf16")
    assert precision.format_of("lm_head", "bf16") == "mxfp8"
    assert precision.format_of("embed", "bf16") == "fp8"
    assert precision.format_of("qkv", "bf16") == "mxfp4"
    assert precision.activations("moe", BF16, "mxfp4") == (BF16,)
    assert precision.kv_format == "bf16"
    assert str(precision) == "fast, lm_head=mxfp8, embed=fp8, moe-activations=bf16, kv-cache=bf16"
    assert str(make_precision()) == "exact"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("balance",),
            "--precision 'balance' is unknown; known are exact, balanced, fast, auto; did you mean balanced?",
        ),
        (("exact", ["lm_head"]), "--layer-format 'lm_head' is not LAYER=FORMAT"),
        (("exact", ["lmhead=fp8"]), "did you mean lm_head?"),
        (("exact", ["qkv=fp6"]), "the format 'fp6' is unknown; known are bf16, fp8, mxfp4, mxfp8, nvfp4"),
        (("exact", ["qkv=fp8", "qkv=mxfp4"]), "gives qkv both fp8 and mxfp4"),
        (("exact", [], "fp4"), "--moe-activations 'fp4' is unknown"),
        (("exact", [], "auto", "int8"), "--kv-cache-dtype 'int8' is unknown; known are auto, bf16, fp8"),
    ],
)
def test_mistakes(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(BadSetting) as error:
        make_precision(*arguments)
    assert message in str(error.value)


def test_columns_that_blocks_do_not_divide() -> None:
    spec = DenseSpec(64, 48, "bf16", BF16, False, 1)
    with pytest.raises(Unsupported, match=r"--precision fast holds o in mxfp4.*48 columns; add --layer-format o=fp8"):
        PRECISIONS["fast"].applied("o", spec)
    assert make_precision("fast", ["o=fp8"]).applied("o", spec).weight_format == "fp8"


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4", "fp8", "nvfp4", "fp8_block"])
def test_chunks_give_what_the_whole_gives(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = encode_channels(x) if fmt == "fp8" else encode(x, FORMATS[fmt])
    monkeypatch.setattr(quantise, "CHUNK", 2 * 64)
    parts = convert(x, fmt)
    assert format_name(parts) == fmt
    assert not isinstance(parts, torch.Tensor)
    assert torch.equal(parts.values, whole.values)
    assert torch.equal(parts.scales, whole.scales)
    if isinstance(parts, BlockScaled) and isinstance(whole, BlockScaled) and whole.row_scales is not None:
        assert parts.row_scales is not None
        assert torch.equal(parts.row_scales, whole.row_scales)
    back = convert(parts, "bf16")
    assert isinstance(back, torch.Tensor)
    assert torch.equal(back, decode(whole, torch.bfloat16))
    assert convert(parts, fmt) is parts
    rows = torch.tensor([5, 0, 5])
    table = convert(x[0], fmt)
    assert not isinstance(table, torch.Tensor)
    assert torch.equal(take_rows(table, rows, torch.float32), decode(table)[rows])


def test_four_bits_become_eight_without_loss() -> None:
    x = encode(torch.randn(4, 64, generator=torch.Generator().manual_seed(2)), MXFP4)
    assert torch.equal(decode(convert(x, "mxfp8")), decode(x))  # type: ignore[arg-type]


def test_converting_holds_the_result_and_one_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "CHUNK", 1 << 14)
    x = torch.ones(2048, 256, dtype=torch.bfloat16)
    with LiveBytes() as live:
        held = convert(x, "mxfp8")
    # Slices of x count as x. The encoder holds three float32 copies of a chunk and some bytes.
    assert live.peak <= x.nbytes + held.nbytes + 4 * 4 * quantise.CHUNK


def test_an_embedding_is_looked_up_in_its_format() -> None:
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    ids = torch.tensor([3, 3, 15])
    exact = Ops(cpu(), Activations.FLOAT32, Preference()).embed(x)
    assert torch.equal(exact(ids), x[ids].float())
    coarse = Ops(cpu(), Activations.FLOAT32, Preference(), make_precision("exact", ["embed=mxfp8"])).embed(x)
    # E4M3 has four significant bits, so half a step is 2**-4; but what is scaled to between 448 and 512 saturates, and
    # loses up to 64 of 512.
    assert ((coarse(ids) - x[ids].float()).abs() <= x[ids].float().abs() * 2**-3 + 2**-16).all()
    assert not torch.equal(coarse(ids), exact(ids))


def test_every_layer_that_can_be_named_is_known() -> None:
    for layer in LAYERS:
        assert make_precision("exact", [f"{layer}=mxfp8"]).format_of(layer, "bf16") == "mxfp8"


def test_a_bound_layer_computes_with_the_weights_of_its_format() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, x = (torch.randn(n, 64, generator=generator).bfloat16() for n in (8, 3))
    layer = Ops(cpu(), Activations.FLOAT32, Preference("reference"), PRECISIONS["fast"]).dense(
        "o", DenseWeights(weight)
    )
    expected = x.float() @ decode(encode(weight, MXFP4)).T
    assert torch.equal(layer(x.float()), expected)
    router = Ops(cpu(), Activations.FLOAT32, Preference("reference"), PRECISIONS["fast"]).dense(
        "router", DenseWeights(weight)
    )
    assert torch.equal(router(x.float()), x.float() @ weight.float().T)


def test_the_command_line_takes_the_names_that_there_are() -> None:
    assert (*PRECISIONS, AUTO) == PRECISION_NAMES
    assert {*LAYER_FORMATS, "fp8_block"} == set(BITS)
