"""A draft head on its way into an engine: refused where it does not fit, and counted in what a model takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from microscale.engine.config import EngineConfig
from microscale.engine.loading.build import Queueing, build_engine
from microscale.engine.loading.drafting import expect_head, prepare_head
from microscale.engine.loading.fit import plan_and_size
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.prepare import prepare
from microscale.engine.loading.warming import recorded
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.errors import BadCheckpoint, BadSetting
from microscale.explain.report import Question, explain
from microscale.hardware import KNOWN, known
from microscale.models import embedded
from microscale.models.config import HeadFormats, LayerKind
from microscale.models.draft_heads.config import PRESETS as HEADS
from microscale.models.draft_heads.weights import DummyHead
from microscale.models.dummy_weights import ShapeTensors
from microscale.models.families import PRESETS
from microscale.models.outline import outline
from microscale.planning.ops import Activations
from microscale.planning.plan import Setup
from microscale.planning.precision import make_precision
from support import tiny_qwen3_5
from support.demo_prompts import demo_prompts
from support.tiny_heads import EAGLE3


def asked(target: str = "gpt-oss-tiny", context: int | None = None, **options: object) -> EngineConfig:
    config = SpeculativeConfig(**({"method": "eagle3", "num_speculative_tokens": 3} | options))  # type: ignore[arg-type]
    load_format = "auto" if target == embedded.NAME else "dummy"
    return EngineConfig(
        target, load_format=load_format, device="cpu", max_model_len=context, max_num_seqs=1, speculative=config
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "--speculative-config: method eagle3 needs a draft head; name its folder or hub id as model."),
        ({"method": "dflash"}, "method dflash needs a draft head"),
        ({"model": "dflash-tiny"}, "dflash-tiny is a DFlash head, and the method is eagle3"),
        ({"method": "dflash", "model": "dflash-tiny", "num_speculative_tokens": 8}, "blocks of up to 7 tokens"),
        ({"quantization": "mxfp8", "draft_lm_head": "bf16"}, "leave one of them out"),
    ],
)
def test_a_head_that_does_not_go_with_the_option_is_one_sentence(options: dict[str, object], says: str) -> None:
    with pytest.raises(BadSetting) as caught:
        prepare(asked(**options))  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert str(caught.value).startswith("--speculative-config")


def test_a_head_of_another_target_names_the_tensor_and_both_shapes(tmp_path: Path) -> None:
    """It was made for 500 tokens, and the target has 512."""
    folder = EAGLE3["nvidia_v3"].write(tmp_path / "head")
    with pytest.raises(BadCheckpoint) as caught:
        prepare(asked(model=str(folder)))
    assert "'lm_head.weight' has shape [500, 160]" in str(caught.value)
    assert "asks for [512, 160]" in str(caught.value)


def test_taps_behind_the_targets_last_layer_are_refused() -> None:
    with pytest.raises(BadCheckpoint, match="behind layer 12, and the target has 4 layers"):
        prepare(asked(model="gpt-oss-20b-eagle3"))


def test_the_embedded_model_has_a_head_of_its_own() -> None:
    prepared = prepare(asked(embedded.NAME))
    assert prepared.head is not None
    assert prepared.head.config.reads.taps == (2, 5, 8)
    built = build_engine(prepared, Queueing())
    assert '"draft_head"' in built.plan


def greedy(options: EngineConfig) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of them were accepted drafts."""
    engine = build_engine(prepare(options), Queueing()).engine
    engine.submit(Request("r", demo_prompts(1)[0], SamplingParams(max_tokens=12, ignore_eos=True)))
    tokens: list[int] = []
    while engine.has_work:
        tokens += [output.token for output in engine.step() if output.token is not None]
    return tokens, engine.stats().num_accepted_tokens


def test_a_quantized_head_changes_no_answer() -> None:
    fixed = ((1, 3),)
    drafted = asked(embedded.NAME, 512, quantization="mxfp8", num_speculative_tokens_per_batch_size=fixed)
    tokens, accepted = greedy(drafted)
    assert accepted > 3
    assert greedy(structs.replace(drafted, speculative=None)) == (tokens, 0)


def test_its_weights_and_pages_are_counted() -> None:
    """By hand: gpt-oss-20b's EAGLE3 head as SpecForge shapes it, on an H200."""
    setup = Setup(KNOWN["h200"], Activations.BF16)
    weights = DummyHead(HEADS["gpt-oss-20b-eagle3"], ShapeTensors())
    shape = outline("gpt-oss-20b", PRESETS["gpt-oss-20b"], Activations.BF16, 16, 4096)
    head = prepare_head(weights, setup, 16)
    plain = Workload(context=4096, sequences=8, draft_tokens=3)
    without, with_head = (plan_and_size(shape, setup, work)[1] for work in (plain, replace(plain, head=head.need)))
    numbers = 2880 * 8640 + 5760 * (64 + 2 * 8) * 64 + 2880 * 64 * 64 + 3 * 2880 * 17280 + 32000 * 2880
    assert with_head.weights["draft_head"] == pytest.approx(2 * numbers, rel=0.001)
    assert with_head.weights.keys() - without.weights.keys() == {"draft_head"}
    # One layer more beside 12 full ones, 8 heads of 64.
    assert with_head.kv.full_per_token - without.kv.full_per_token == 2 * 8 * 64 * 2
    assert with_head.activations > without.activations + 2048 * 2 * 8640
    pages = [memory.pages()[LayerKind.FULL] for memory in (with_head, without)]
    assert 0 < pages[0] < pages[1]
    narrow = prepare_head(weights, setup, 16, HeadFormats(lm_head="mxfp8"))
    saved = head.need.weights - narrow.need.weights
    assert saved == pytest.approx(32000 * 2880 * (2 - 33 / 32), rel=0.01)
    whole = prepare_head(weights, setup, 16, HeadFormats("mxfp8"))
    assert head.need.weights - whole.need.weights == pytest.approx(numbers * (2 - 33 / 32), rel=0.01)
    assert replace(whole.need, weights=0) == replace(head.need, weights=0)


@pytest.mark.parametrize("name", ["gpt-oss-20b-eagle3", "gpt-oss-120b-eagle3-v3", "dflash-tiny"])
@pytest.mark.parametrize("card", ["h200", "gb10", "b200", "a100"])
def test_a_quantized_head_runs_on_the_kernels_of_its_format(name: str, card: str) -> None:
    """And on no bf16 copy of the rounded weights, which would give the rounding and none of the bytes."""
    setup = Setup(KNOWN[card], Activations.BF16)
    head = prepare_head(DummyHead(HEADS[name], ShapeTensors()), setup, 16, HeadFormats("mxfp8"))
    dense = [decision for decision in head.plan.decisions.values() if decision.op == "dense"]
    assert {decision.chosen for decision in dense} == {"triton_mxfp8"}
    layers = {decision.layer for decision in dense}
    assert layers == {"fc", "qkv", "o", "mlp.gate_up", "mlp.down"} | (set() if "dflash" in name else {"lm_head"})


def test_what_runs_a_quantized_head_is_told() -> None:
    built = build_engine(prepare(asked(embedded.NAME, quantization="mxfp8")), Queueing())
    told = json.loads(built.plan)["speculative"]["decisions"]
    formats = {entry["layer"]: entry["format"] for entry in told if entry["op"] == "dense"}
    assert set(formats.values()) == {"mxfp8"}
    assert formats.keys() == {"fc", "qkv", "o", "mlp.gate_up", "mlp.down", "lm_head"}


def test_warming_makes_its_kernels_ready_too() -> None:
    setup = Setup(KNOWN["h200"], Activations.BF16)
    config = PRESETS["gpt-oss-tiny"]
    head = prepare_head(DummyHead(HEADS["dflash-tiny"], ShapeTensors()), setup, 16)
    plain, more = (recorded(config, setup, 16, 64, 3, each) for each in (None, head))
    assert plain.keys() < more.keys()


def test_a_head_of_random_numbers_is_loaded_by_its_name() -> None:
    fixed = ((1, 3),)  # what is drafted must not depend on how busy the machine is
    options = asked(method="dflash", model="dflash-tiny", context=256, num_speculative_tokens_per_batch_size=fixed)
    built = build_engine(prepare(options), Queueing())
    built.engine.submit(Request("r", [1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)))
    while built.engine.has_work:
        built.engine.step()
    assert built.engine.stats().num_drafts > 0


# ---- MTP -------------------------------------------------------------------------------------------------------------


def mtp(folder: Path, **options: object) -> EngineConfig:
    fixed = SpeculativeConfig("mtp", 3, num_speculative_tokens_per_batch_size=((1, 3),))
    config = EngineConfig(str(folder), device="cpu", layer_format=("experts=mxfp8",), speculative=fixed)
    return structs.replace(config, **options)


def test_the_mtp_layer_of_a_checkpoint_changes_no_answer(tmp_path: Path) -> None:
    config = tiny_qwen3_5.CASES["as_published"]
    drafted = mtp(tiny_qwen3_5.write_qwen3_5(tmp_path, config, tiny_qwen3_5.random_qwen3_5(config)))

    def tokens(options: EngineConfig) -> tuple[list[int], int]:
        engine = build_engine(prepare(options), Queueing()).engine
        request = Request("r", [3, 1, 4, 1, 5], SamplingParams(max_tokens=24, ignore_eos=True))
        engine.submit(request)
        while engine.has_work:
            engine.step()
        return request.tokens, engine.stats().num_drafts

    found, drafts = tokens(drafted)
    assert drafts > 8
    assert tokens(structs.replace(drafted, speculative=None)) == (found, 0)


def test_without_an_mtp_layer_nothing_is_downloaded(tmp_path: Path) -> None:
    """The index of the files says so; of a checkpoint on the hub it comes before them."""
    config = tiny_qwen3_5.CASES["as_published"]
    (tmp_path / "config.json").write_text(json.dumps(tiny_qwen3_5.config_json(config)))
    names = {"model.language_model.embed_tokens.weight": "model-00001-of-00001.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(BadSetting, match=r"the checkpoint has no MTP layer \(mtp\.\*\); start it without"):
        prepare(mtp(tmp_path))
    with pytest.raises(BadSetting, match="the checkpoint has no MTP layer"):
        explain(Question(str(tmp_path), "gb10", make_precision("exact", ("experts=mxfp8",)), speculative="mtp"))


def test_memory_is_planned_with_the_formats_that_the_index_shows(tmp_path: Path) -> None:
    """FP8 blocks of an MTP layer, before any file with weights is there."""
    config = tiny_qwen3_5.CASES["as_published"]
    (tmp_path / "config.json").write_text(json.dumps(tiny_qwen3_5.config_json(config)))
    names = ["mtp.fc.weight", "mtp.layers.0.mlp.experts.0.gate_proj.weight_scale_inv"]
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    option = SpeculativeConfig("mtp", 3)
    head = expect_head(option, str(tmp_path), config, offline=True, load_format="auto")
    assert head.config.layer.formats.experts == "fp8_block"  # type: ignore[union-attr]
    assert head.config.layer.formats.qkv == "bf16"  # type: ignore[union-attr]
    usual = expect_head(option, str(tmp_path), config, offline=True, load_format="dummy")
    setup = Setup(known("gb10"), Activations.BF16)
    planned, other = (prepare_head(each, setup, 16).need.weights for each in (head, usual))
    assert planned != other  # BF16 experts are held in MXFP8
