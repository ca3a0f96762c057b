"""What fits: sums checked by hand, refusals with ways that do work, and loading within the weights and one layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from microscale import hardware
from microscale.engine.limits import LEAST_SEQUENCES, SCORED_TOKENS
from microscale.engine.loading.fit import advice, check_fits, fitting_options, plan_and_size, refusal
from microscale.engine.loading.memory import LEAST_CONTEXT, Memory, Workload, weight_bytes, with_room
from microscale.engine.loading.usable import check_left, reserve_bytes, usable_memory
from microscale.errors import BadSetting, Unsupported
from microscale.hardware import GIB, KNOWN
from microscale.hardware.tiles.attention import WIDEN_BYTES
from microscale.models.config import LayerKind
from microscale.models.families import PRESETS
from microscale.models.gpt_oss.model import GptOss
from microscale.models.outline import Outline, outline
from microscale.planning import quantise, registry
from microscale.planning.ops import Activations, Ops, Preference
from microscale.planning.plan import Setup, make_plan
from microscale.planning.precision import PRECISIONS, make_precision
from support.families import dummy_gpt_oss, gpt_oss_preset
from support.live_bytes import LiveBytes

CONFIGS = PRESETS


def shape(model: str) -> Outline:
    return outline(model, CONFIGS[model], Activations.BF16, 16, 4096)


def setup(card: str, precision: str = "exact") -> Setup:
    return Setup(KNOWN[card], Activations.BF16, precision=PRECISIONS[precision])


def sums(model: str, card: str, workload: Workload, precision: str = "exact", available: int | None = None) -> Memory:
    chosen = setup(card, precision)
    return plan_and_size(shape(model), chosen, workload, available)[1]


def check(model: Outline, chosen: Setup, workload: Workload) -> None:
    """As a start does."""
    check_fits(model, chosen, plan_and_size(model, chosen, workload)[1])


def test_weights_and_kv_of_gpt_oss_120b_by_hand() -> None:
    memory = sums("gpt-oss-120b", "rtxpro6000", Workload(context=131072, step_tokens=8192))
    blocks = 3 * 2880 * 2880 // 32
    # 17 bytes to 32 weights, and the biases; packing may pad.
    assert memory.weights["experts"] == pytest.approx(36 * 128 * (blocks * 17 + 2 * (5760 + 2880)), rel=0.005)
    assert memory.weights["embed"] == memory.weights["lm_head"] == 2 * 201088 * 2880
    # 18 full layers with 8 heads of 64, keys and values in two bytes; as many sliding ones hold 128 + 16 positions.
    assert memory.kv.full_per_token == 18 * 2 * 8 * 64 * 2
    assert memory.kv.per_sequence_sliding() == 18 * 2 * 8 * 64 * 2 * (128 + 16)
    assert memory.kv.bytes(131072, 1) == memory.kv.full_per_token * (131072 + 144 + 8192)
    assert memory.max_context == 131072


def sequences_by_default(model: str, card: str, **changes: Any) -> int:
    workload = Workload(sequences=LEAST_SEQUENCES, **changes)
    memory = with_room(sums(model, card, workload), lambda more: sums(model, card, more))
    return memory.workload.sequences


def test_as_many_sequences_as_have_room() -> None:
    cards = {"h200": 256, "rtxpro6000": 256, "gb10": 256, "rtx5090": 128, "rtx4090": 64, "rtx5060ti": 64}
    assert {card: sequences_by_default("gpt-oss-20b", card) for card in cards} == cards
    assert sequences_by_default("qwen3.6-35b-a3b-nvfp4", "h200") == 256
    assert sequences_by_default("qwen3.6-35b-a3b-nvfp4", "rtx5090") == 64, "each has 63 MiB of states"
    assert sequences_by_default("gpt-oss-20b", "rtx5090", context=1024) == 256
    assert sequences_by_default("gpt-oss-20b", "h200", context=131072) == 64
    assert sequences_by_default("gpt-oss-20b", "h200", step_tokens=200) == 128, "a step has a token of each"


def test_a_server_promises_its_context_to_one_sequence() -> None:
    """As the manual starts one on a card of 32 GB; `explain` and `bench` ask for all sequences at once."""
    for model, card, context in (("gpt-oss-20b", "rtx5090", 32768), ("gpt-oss-120b", "rtxpro6000", 65536)):
        together = Workload(context=context, sequences=64)
        memory = sums(model, card, replace(together, promised=LEAST_CONTEXT))
        assert (sums(model, card, together).fits, memory.fits) == (False, True)
        assert memory.pages()[LayerKind.FULL] * 16 >= context + 63 * LEAST_CONTEXT
        assert sequences_by_default(model, card, context=context, promised=LEAST_CONTEXT) >= 128
    workload = Workload(context=131072, sequences=512, promised=LEAST_CONTEXT)
    with pytest.raises(Unsupported, match=r"for 131072 tokens and 511 x 1024 \+"):
        check(shape("gpt-oss-20b"), setup("rtx5090"), workload)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-4-26b-a4b", "qwen3.6-35b-a3b-nvfp4"])
@pytest.mark.parametrize("context", [4096, 131072])
def test_a_server_that_just_fits_hands_out_no_more_than_there_is(model: str, context: int) -> None:
    for page_size in (16, 1024):
        workload = Workload(context=context, sequences=64, page_size=page_size, promised=LEAST_CONTEXT)
        fits = sums(model, "h200", workload)
        memory = replace(fits, usable=fits.needed)
        pages, kv = memory.pages(), memory.kv
        numbers = pages[LayerKind.FULL] * kv.full_per_token + pages[LayerKind.SLIDING] * kv.sliding_per_position
        states = (pages.get(LayerKind.LINEAR, -1) + 1) * kv.states
        assert memory.fixed + numbers * page_size + states <= memory.usable


def test_a_window_costs_the_same_at_any_context_and_fp8_halves_the_cache() -> None:
    exact, fast = (sums("gemma-4-26b-a4b", "h200", Workload(context=4096), plan) for plan in ("exact", "fast"))
    grown = exact.kv.bytes(262144, 1) - exact.kv.bytes(131072, 1)
    assert grown == 131072 * 5 * 2 * 2 * 512 * 2  # the five full layers alone
    assert fast.kv.bytes(4096, 3) * 2 == exact.kv.bytes(4096, 3)


@pytest.mark.parametrize("model", ["gpt-oss-20b", "gpt-oss-120b", "gemma-4-26b-a4b", "qwen3-30b-a3b"])
def test_max_context_and_sequences_are_the_largest_that_fit(model: str) -> None:
    for card in KNOWN:
        memory = sums(model, card, Workload(context=8192, sequences=4))
        longest, most = memory.max_context, memory.max_sequences
        assert memory.fits == (longest >= 8192) == (most >= 4)
        for context, sequences in ((longest, 4), (8192, most)):
            if context and sequences:
                assert sums(model, card, Workload(context=context, sequences=sequences)).fits
        if 0 < longest < memory.model_context:
            assert memory.fixed + memory.kv.bytes(longest + 1, 4) > memory.usable
        assert not sums(model, card, Workload(context=8192, sequences=most + 1)).fits


def test_logits_of_scored_prompts_are_counted() -> None:
    """A row a sequence, and as many as a step may score; a step of fewer tokens cannot score more than those."""
    row = PRESETS["gpt-oss-20b"].vocab_size * 6
    needs = {tokens: sums("gpt-oss-20b", "h100", Workload(step_tokens=tokens)) for tokens in (1, 2, 2048)}
    per_token = needs[2].activations - needs[1].activations - row
    assert needs[2048].activations == 2048 * per_token + (1 + SCORED_TOKENS) * row


def test_the_bf16_copy_of_fp8_keys_is_counted() -> None:
    """A position of a layer of gpt-oss is 2 KiB in bf16. The copy of many sequences is made up to its limit."""

    def more(context: int, sequences: int) -> int:
        needs = (
            sums("gpt-oss-20b", "h200", Workload(context=context, sequences=sequences), precision).activations
            for precision in ("fast", "balanced")
        )
        fast, balanced = needs
        return fast - balanced

    assert more(8192, 1) == 8192 * 2048
    assert more(8192, 16) == 16 * 8192 * 2048
    assert more(131072, 16) == WIDEN_BYTES


def test_tied_embeddings_are_one_tensor_while_lm_head_stays_bf16() -> None:
    assert "embed" not in sums("gemma-4-26b-a4b", "h200", Workload()).weights
    assert sums("gemma-4-26b-a4b", "h200", Workload(), "balanced").weights["embed"] == 2 * 262144 * 2816


def test_unified_memory_is_what_the_system_reports_less_room() -> None:
    gb10 = KNOWN["gb10"]
    assert usable_memory(gb10, 0.9, None)[0] == int(0.9 * gb10.memory_bytes)
    assert usable_memory(gb10, 0.9, 70 * GIB) == (62 * GIB, "70.0 GiB free, 8.0 of them left to the system")
    assert usable_memory(gb10, 0.9, 70 * GIB, 3 * GIB) == (67 * GIB, "70.0 GiB free, 3.0 of them left to the system")
    assert usable_memory(gb10, 1.0, None)[0] == gb10.memory_bytes - 8 * GIB
    assert usable_memory(KNOWN["h100"], 0.9, 50 * GIB) == (50 * GIB, "50.0 GiB free")
    machine = hardware.cpu()
    assert usable_memory(machine, 0.9, machine.memory_bytes)[0] < machine.memory_bytes


def test_a_start_on_unified_memory_is_refused_before_the_system_has_less_than_its_reserve() -> None:
    """120b fits an idle GB10. With less free it would leave too little; the refusal says what helps, and that fits."""
    model, chosen, workload = shape("gpt-oss-120b"), setup("gb10"), Workload(context=4096)
    _, idle = plan_and_size(model, chosen, workload, 120 * GIB)
    assert idle.fits
    free = idle.needed + 6 * GIB
    _, memory = plan_and_size(model, chosen, workload, free)
    assert not memory.fits
    text = refusal(memory, advice(model, chosen, memory))
    assert f"{free / GIB:.1f} GiB free, 8.0 of them left to the system" in text
    assert "it fits with --reserve-memory 4 (" in text
    assert plan_and_size(model, chosen, replace(workload, reserve=4 * GIB), free)[1].fits
    assert plan_and_size(model, chosen, workload, idle.needed + 8 * GIB)[1].fits


def test_pages_leave_the_reserve_too() -> None:
    _, memory = plan_and_size(shape("gpt-oss-20b"), setup("gb10"), Workload(), 100 * GIB)
    pages = memory.pages()
    kv = memory.kv.page_size * (
        pages[LayerKind.FULL] * memory.kv.full_per_token + pages[LayerKind.SLIDING] * memory.kv.sliding_per_position
    )
    assert 100 * GIB - memory.fixed - kv >= 8 * GIB


def test_a_reserve_is_for_memory_that_is_shared() -> None:
    with pytest.raises(BadSetting, match=r"--reserve-memory is for memory that a GPU shares .* H200 has its own"):
        reserve_bytes(KNOWN["h200"], GIB)
    with pytest.raises(BadSetting, match=r"--reserve-memory 200 is not between 0 and the 120\.0 GiB of NVIDIA GB10"):
        reserve_bytes(KNOWN["gb10"], 200 * GIB)
    assert reserve_bytes(KNOWN["h200"], None) == 0


def test_a_load_ends_when_others_take_the_reserve() -> None:
    gb10 = KNOWN["gb10"]
    check_left(gb10, None, 8 * GIB)
    check_left(KNOWN["h200"], None, 0)
    with pytest.raises(Unsupported, match=r"fell to 7\.5 GiB, and 8\.0 stay with the system: end other programs"):
        check_left(gb10, None, int(7.5 * GIB))
    check_left(gb10, 2 * GIB, int(7.5 * GIB))


def test_a_refusal_names_three_ways_and_each_of_them_fits() -> None:
    model, chosen, workload = shape("gpt-oss-20b"), setup("rtx4090"), Workload(context=131072, sequences=4)
    with pytest.raises(Unsupported) as error:
        check(model, chosen, workload)
    text = str(error.value)
    assert text.startswith("gpt-oss-20b needs 26.6 GiB on NVIDIA GeForce RTX 4090: weights 12.8 (experts 9.5)")
    found, _ = fitting_options(model, chosen, plan_and_size(model, chosen, workload)[1])
    shorter = int(found[1].options.removeprefix("--max-model-len "))
    assert (found[0].options, found[2].options) == ("--max-num-seqs 2", "--kv-cache-dtype fp8")
    for way in found:
        assert way.options in text
        assert way.needed <= 0.9 * 24 * GIB
    check(model, chosen, replace(workload, context=shorter))
    with pytest.raises(Unsupported):
        check(model, chosen, replace(workload, context=shorter + 16))


def test_when_no_option_helps_the_cards_that_do_are_named() -> None:
    with pytest.raises(Unsupported, match=r"no option makes it fit \(the least, .* cards that hold it: a100, h100"):
        check(shape("gpt-oss-120b"), setup("l40s"), Workload(context=131072))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "--max-model-len 0"),
        ({"context": 131073}, "--max-model-len 131073 is not between 1 and 131072"),
        ({"sequences": 0}, "--max-num-seqs 0"),
        ({"utilization": 1.5}, "--gpu-memory-utilization 1.5"),
        ({"step_tokens": 0}, "--max-num-batched-tokens 0"),
    ],
)
def test_workloads_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadSetting, match=message):
        sums("gpt-oss-20b", "h100", replace(Workload(), **change))


TINY = replace(gpt_oss_preset("gpt-oss-tiny"), num_heads=4, head_dim=64)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_binding_decides_is_what_the_plan_says(precision: str) -> None:
    """For a GPU that is not there: packing is plain torch."""
    for gpu in (hardware.cpu(), KNOWN["h100"], KNOWN["rtx5090"]):
        activations = Activations.FLOAT32 if gpu.is_cpu else Activations.BF16
        chosen = Setup(gpu, activations, precision=PRECISIONS[precision])
        made = make_plan("tiny", outline("tiny", TINY, activations, 16, TINY.max_context).uses, chosen)
        ops = Ops(gpu, activations, Preference(), PRECISIONS[precision])
        GptOss(dummy_gpt_oss(TINY), ops, torch.device("cpu"))
        assert ops.plan.decisions == made.decisions
        # With the plan given, binding takes it as it is.
        GptOss(
            dummy_gpt_oss(TINY),
            Ops(gpu, activations, Preference(), PRECISIONS[precision], made),
            torch.device("cpu"),
        )


def test_loading_holds_the_weights_and_one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantise, "CHUNK", 1 << 10)
    precision = make_precision("fast", ["embed=mxfp4"])
    preference = Preference(backend="reference")  # holds weights as they are quantised; its peak is the loader's
    chosen = Setup(hardware.cpu(), Activations.FLOAT32, preference, precision)
    model = outline("tiny", TINY, Activations.FLOAT32, 16, TINY.max_context)
    weights = sum(weight_bytes(model, make_plan("tiny", model.uses, chosen), chosen).values())
    with LiveBytes() as live:
        loaded = GptOss(dummy_gpt_oss(TINY), Ops(*vars(chosen).values()), torch.device("cpu"))
    layer = dummy_gpt_oss(TINY).layer(0, "cpu")
    largest = sum(tensor.nbytes for tensor in vars(layer).values())
    chunk = 5 * 4 * quantise.CHUNK
    assert live.now <= weights + chunk
    assert live.peak <= weights + largest + chunk
    assert len(loaded.layers) == TINY.num_layers


def test_every_implementation_says_what_its_weights_take() -> None:
    """Or the oracle and the memory check would take them for nothing."""
    for model in ("gpt-oss-20b", "gemma-4-26b-a4b", "qwen3-30b-a3b"):
        for use in shape(model).uses:
            if use.op in ("moe", "dense"):
                for entry in registry.of_op(use.op):
                    if entry.supports(use.spec, KNOWN["h100"]) is None:
                        assert entry.packed_bytes(use.spec) > 0, entry.name
