"""Every implementation that says it can be captured, at the sizes of decoding steps, on every card that it supports
(``support/capture``); on a GPU in real graphs. Whole steps of models, and what a model says of its choices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from microscale.engine.pages import PagePool
from microscale.engine.request import Request
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.step_inputs import StepInputs
from microscale.engine.work import Work
from microscale.formats import FORMATS, MXFP4, MXFP8, BlockScaled, ChannelScaled, encode, encode_channels
from microscale.hardware import KNOWN, REPRESENTATIVES, Gpu, cpu, detect
from microscale.kernels.attention.op import AttentionOp
from microscale.kernels.attention.spec import AttentionBatch, AttentionSpec, PagedKv
from microscale.kernels.dense.spec import DenseOp, DenseSpec, DenseWeights
from microscale.kernels.moe.spec import Gate, GateKind, MoeOp, MoeSpec, Parts
from microscale.kernels.op import Activations, Implementation, torch_dtype
from microscale.kernels.recurrent.spec import RecurrentOp, RecurrentSpec
from microscale.kernels.small.spec import HeadNorms, NormAddNorm, RopeTable, Router, SmallOps, SmallSpec
from microscale.models.config import PAGED, LayerKind
from microscale.models.families import PRESETS, build_model, open_weights
from microscale.models.outline import outline
from microscale.models.recorded import Step
from microscale.planning import registry
from microscale.planning.bound import Small
from microscale.planning.decision import Plan
from microscale.planning.ops import Embedding, Ops, Preference
from microscale.planning.paths import PathList, ask, path_of
from microscale.planning.plan import BUCKETS, Setup, make_plan, uncapturable
from microscale.planning.precision import PRECISIONS
from microscale_lab.calls import bind_small, run_attention, run_dense, run_logits, run_moe
from microscale_lab.cases import recurrent
from microscale_lab.cases.experts import ExpertsInput, make_routing, make_weights
from support.capture import HostRead, NoHostReads, check_capturable

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
GPUS: list[Gpu] = [detect()] if ON_GPU else [cpu(), *(KNOWN[name] for name in REPRESENTATIVES)]
CAPTURABLE = [entry for entry in registry.IMPLEMENTATIONS if entry.uncapturable is None]
ROWS = [1, 5, 70]
Call = Callable[[], object]
Weight = torch.Tensor | ChannelScaled | BlockScaled
Spec = DenseSpec | MoeSpec | AttentionSpec | RecurrentSpec | SmallSpec


def of_op(op: str) -> list[pytest.ParameterSet]:
    return [pytest.param(entry, id=entry.name) for entry in CAPTURABLE if entry.op == op]


def specs(base: Spec) -> list[Spec]:
    """``base`` in every format and with all activations."""
    formats: list[Spec] = [base]
    if isinstance(base, DenseSpec | MoeSpec):
        formats = [replace(base, weight_format=f) for f in ("bf16", "fp8", *FORMATS)]
    return [replace(spec, activations=activations) for spec in formats for activations in Activations]


def runnable(entry: Implementation[Any], base: Spec) -> list[tuple[Spec, Gpu]]:
    """What it can run, and where."""
    # Plain torch asks nothing of a card but whether it is one; and on a CPU it runs as a CPU's.
    found = [(spec, gpu) for spec in specs(base) for gpu in GPUS if entry.supports(spec, gpu) is None]
    if not ON_GPU and any(gpu.is_cpu for _, gpu in found):
        found = [(spec, gpu) for spec, gpu in found if gpu.is_cpu]
    if not found:
        assert ON_GPU, f"{entry.op}/{entry.name} runs on none of the cards here"
        pytest.skip(f"{entry.name} does not run on {GPUS[0].name}")
    return found


def tokens_of(spec: DenseSpec | MoeSpec | SmallSpec, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns, generator=generator)
    return x.to(DEVICE, torch_dtype(spec.activations))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("entry", of_op("dense"))
def test_dense(entry: DenseOp[Any], rows: int) -> None:
    for spec, gpu in runnable(entry, DenseSpec(96, 128, "bf16", Activations.BF16, True, tokens=rows, softcap=30.0)):
        assert isinstance(spec, DenseSpec)
        plain = torch.randn(96, 128, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        encoded: dict[str, Callable[[], Weight]] = {"bf16": plain.bfloat16, "fp8": partial(encode_channels, plain)}
        weight = encoded.get(spec.weight_format) or partial(encode, plain, FORMATS[spec.weight_format])
        packed = entry.pack(DenseWeights(weight(), torch.ones(96, device=DEVICE).bfloat16()), spec)
        x, residual = tokens_of(spec, rows, 128), tokens_of(spec, rows, 96)
        check_capturable(partial(run_dense, entry, packed, spec, gpu, x, residual))
        check_capturable(partial(run_logits, entry, packed, spec, gpu, x))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("entry", of_op("moe"))
def test_moe(entry: MoeOp[Any], rows: int) -> None:
    gate = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)
    case = ExpertsInput("capture", rows)
    base = MoeSpec(4, 2, 128, 128, "mxfp4", Activations.BF16, gate, True, tokens=rows)
    for spec, gpu in runnable(entry, base):
        assert isinstance(spec, MoeSpec)
        packed = entry.pack(make_weights(case, spec.weight_format, DEVICE), spec)
        routing = make_routing(case, DEVICE)
        x = tokens_of(spec, rows, 128)
        check_capturable(partial(run_moe, entry, packed, spec, gpu, x, routing))
        if (path := ask(entry, PathList.PARTS, spec, gpu).path) is not None:
            check_capturable(partial(entry.run_parts, packed, spec, gpu, x, routing, path))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("entry", of_op("attention"))
def test_attention(entry: AttentionOp, rows: int) -> None:
    """One token of each sequence, as decoding has it."""
    base = AttentionSpec(8, 2, 64, None, True, 16, Activations.BF16, tokens=rows, context=64)
    for window in (None, 20):
        for spec, gpu in runnable(entry, replace(base, window=window)):
            assert isinstance(spec, AttentionSpec)
            dtype = torch_dtype(spec.activations)
            k, v = (torch.randn(4 * rows, 2, 16, 64).to(DEVICE, dtype) for _ in range(2))
            starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
            lens = (torch.arange(rows, dtype=torch.int32, device=DEVICE) % 60) + 1
            table = torch.arange(4 * rows, dtype=torch.int32, device=DEVICE).view(rows, 4)
            q, sinks = torch.randn(rows, 8, 64).to(DEVICE, dtype), torch.zeros(8, device=DEVICE).to(dtype)
            batch = AttentionBatch(starts, lens, table, 1)
            check_capturable(partial(run_attention, entry, spec, gpu, q, PagedKv(k, v), batch, sinks))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("entry", of_op("recurrent"))
def test_recurrent(entry: RecurrentOp, rows: int) -> None:
    """One token of each sequence, and prompts of so many."""
    base = RecurrentSpec(1, 2, 32, 32, 4, 64, Activations.BF16, tokens=rows)
    for spec, gpu in runnable(entry, base):
        assert isinstance(spec, RecurrentSpec)
        weights, cache = (
            recurrent.make_weights(spec, device=DEVICE),
            recurrent.make_cache(spec, rows, device=DEVICE),
        )
        tokens = recurrent.make_tokens(spec, rows, device=DEVICE)
        for counts in ([1] * rows, [rows]):
            slots = range(len(counts))
            batch = recurrent.make_batch([3] * len(counts), counts, slots, [[slot] for slot in slots], DEVICE)
            asked = recurrent.spec_of(spec, batch, rows)
            path = path_of(entry, PathList.RUN, asked, gpu)
            check_capturable(partial(entry.run, asked, gpu, *tokens, weights, cache, batch, path))


def small_calls(ops: Small, spec: SmallSpec, rows: int) -> dict[str, Call]:
    """Every op of ``SmallOps`` by its name."""
    dtype, width = torch_dtype(spec.activations), spec.hidden
    x, residual = tokens_of(spec, rows, width), tokens_of(spec, rows, width)
    weight = torch.ones(width, device=DEVICE).to(dtype)
    parts = Parts(torch.randn(2 * rows, width).to(DEVICE), 2)
    router = Router(torch.randn(8, width).to(DEVICE, dtype), torch.zeros(8, device=DEVICE).to(dtype))
    scaled = Router(router.weight, expert_scale=torch.ones(8, device=DEVICE))
    one = NormAddNorm(weight, weight.expand(1, -1).contiguous(), 1e-5)
    two = NormAddNorm(weight, weight.expand(2, -1).contiguous(), 1e-5, 0.5)
    joined = replace(one, before_other=weight, joined=weight)
    kv = PagedKv(*(torch.zeros(8, 2, 16, 64, device=DEVICE).to(dtype) for _ in range(2)))
    codes = PagedKv(
        *(torch.zeros(8, 2, 16, 64, device=DEVICE, dtype=torch.uint8) for _ in range(2)),
        *(torch.ones(2, device=DEVICE) for _ in range(2)),
    )
    qkv = torch.randn(rows, 12, 64).to(DEVICE, dtype)
    positions = slots = torch.arange(rows, device=DEVICE)
    table = RopeTable(torch.rand(32).to(DEVICE), 1.0)
    norms = HeadNorms(torch.ones(64, device=DEVICE).to(dtype), torch.ones(64, device=DEVICE).to(dtype), 1e-5)
    logits = torch.randn(rows, 8).to(DEVICE, dtype)
    wide = torch.randn(rows, 2 * width).to(DEVICE, dtype)
    heads = torch.randn(rows, 4, 64).to(DEVICE, dtype)
    rows_table, pair = torch.randn(9, width).to(DEVICE, torch.bfloat16), torch.ones(2, width).to(DEVICE, dtype)
    ids, ids_of = torch.arange(rows, device=DEVICE) % 9, torch.arange(64, device=DEVICE)
    blocks = torch.randn(rows, 4).to(DEVICE), torch.arange(4 * rows, device=DEVICE).view(rows, 4).int() % 64
    guesses = torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def rope() -> None:
        for cache in (kv, codes):
            ops.rope_and_write_kv(qkv, 8, positions, table, cache, slots)
            ops.rope_and_write_kv(qkv, 8, positions, table, cache, slots, norms)
            ops.rope_and_write_kv(qkv[:, :10], 8, positions, table, cache, slots, norms)

    return {
        "rms_norm": lambda: (ops.rms_norm(x, weight, 1e-5), ops.rms_norm(x, None, 1e-5)),
        "add_rms_norm": lambda: [ops.add_rms_norm(each, residual, weight, 1e-5) for each in (x, parts)],
        "add_rms_norm_mxfp8": lambda: [ops.add_rms_norm_mxfp8(each, residual, weight, 1e-5) for each in (x, parts)],
        "gate_heads": lambda: ops.gate_heads(heads[:, :2], heads[:, 2:]),
        "norm_add_norm": lambda: (
            ops.norm_add_norm(x, None, residual, two),
            ops.norm_add_norm(x, residual, residual, joined),
        ),
        "norm_add_norm_route": lambda: ops.norm_add_norm_route(x, residual, two, scaled, 2),
        "add_norm_route": lambda: ops.add_norm_route(x, residual, weight, 1e-5, router, 2),
        "rope_and_write_kv": rope,
        "norm_pair": lambda: ops.norm_pair(rows_table, ids, x, pair, 1e-5),
        "likeliest": lambda: (ops.likeliest(*blocks, None, guesses), ops.likeliest(*blocks, ids_of, guesses)),
        "route": lambda: (ops.route(logits, 2), ops.route(logits, 2, torch.ones(8, device=DEVICE))),
        "gated": lambda: ops.gated(wide, Gate(GateKind.GELU_TANH, interleaved=False)),
    }


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("entry", of_op("small"))
def test_small(entry: SmallOps, rows: int) -> None:
    for spec, gpu in runnable(entry, SmallSpec(128, 8, 2, 64, 8, 2, Activations.BF16, tokens=rows)):
        assert isinstance(spec, SmallSpec)
        calls = small_calls(bind_small(entry, spec, gpu), spec, rows)
        assert calls.keys() == SmallOps.__abstractmethods__ - {"supports", "cost"} | {
            "add_norm_route",
            "norm_add_norm_route",
        }
        for call in calls.values():
            check_capturable(call)


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "mxfp8", "mxfp4"])
def test_embeddings(fmt: str) -> None:
    """No op with implementations, and part of every captured step."""
    plain = torch.randn(40, 64).to(DEVICE)
    made: dict[str, Callable[[], Weight]] = {
        "bf16": plain.bfloat16, "fp8": partial(encode_channels, plain),
        "mxfp8": partial(encode, plain, MXFP8), "mxfp4": partial(encode, plain, MXFP4),
    }  # fmt: skip
    weight = made[fmt]()
    rows = torch.arange(7, device=DEVICE)
    check_capturable(lambda: Embedding(weight, torch.bfloat16)(rows))


def test_every_op_of_a_step_is_here() -> None:
    """An implementation that claims to be capturable in an op without a test above would be believed unseen."""
    assert {entry.op for entry in CAPTURABLE} == {"dense", "moe", "attention", "recurrent", "small"}


UNCAPTURABLE = [entry for entry in registry.IMPLEMENTATIONS if entry.uncapturable is not None]


@pytest.mark.skipif(ON_GPU, reason="a failed capture on a GPU spoils what comes after it")
@pytest.mark.parametrize("entry", [e for e in UNCAPTURABLE if e.op == "moe"], ids=lambda e: e.name)
def test_experts_that_say_so_read_on_the_host(entry: MoeOp[Any]) -> None:
    """The check sees what they do; and what has become capturable should say so."""
    gate, case = Gate(GateKind.SWIGLU_CLAMPED, interleaved=True), ExpertsInput("capture", 3)
    spec = MoeSpec(4, 2, 128, 128, "mxfp4", Activations.BF16, gate, True, tokens=3)
    packed = entry.pack(make_weights(case, "mxfp4", DEVICE), spec)
    x, routing = tokens_of(spec, 3, 128), make_routing(case, DEVICE)
    with NoHostReads(), pytest.raises(HostRead):
        run_moe(entry, packed, spec, GPUS[0], x, routing)


@pytest.mark.skipif(ON_GPU, reason="a failed capture on a GPU spoils what comes after it")
@pytest.mark.parametrize("entry", [e for e in UNCAPTURABLE if e.op == "attention"], ids=lambda e: e.name)
def test_attention_that_says_so_reads_on_the_host(entry: AttentionOp) -> None:
    spec = AttentionSpec(8, 2, 64, None, False, 16, Activations.BF16, tokens=1, context=64)
    kv = PagedKv(*(torch.randn(4, 2, 16, 64) for _ in range(2)))
    batch = AttentionBatch(torch.tensor([0, 1]), torch.tensor([9]), torch.zeros(1, 4, dtype=torch.int32), 1)
    q = torch.randn(1, 8, 64)
    with NoHostReads(), pytest.raises(HostRead):
        run_attention(entry, spec, GPUS[0], q, kv, batch)


def test_all_others_say_why() -> None:
    """Experts and attention are seen to read above; sampling is never captured."""
    assert {entry.op for entry in UNCAPTURABLE} == {"moe", "attention", "recurrent", "sampling"}
    assert all(entry.uncapturable != Implementation.uncapturable for entry in UNCAPTURABLE)


# ---- models ----------------------------------------------------------------------------------------------------------


def test_who_says_nothing_is_not_captured() -> None:
    assert Implementation.uncapturable is not None


def plan_of(
    model: str, card: str, activations: Activations, precision: str = "exact", backend: str | None = None
) -> Plan:
    shape = outline(model, PRESETS[model], activations, 16, 4096)
    return make_plan(model, shape.uses, Setup(KNOWN[card], activations, Preference(backend), PRECISIONS[precision]))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("card", REPRESENTATIVES)
def test_what_a_card_runs_in_bf16_is_captured(card: str, precision: str) -> None:
    """Up to as many sequences as decode together. A kernel that forgot to say so would cost the graphs."""
    plan = plan_of("gpt-oss-20b", card, Activations.BF16, precision)
    assert [uncapturable(plan, tokens) for tokens in BUCKETS[:5]] == [None] * 5


def test_float32_and_the_reference_are_not() -> None:
    wide = plan_of("gpt-oss-tiny", "h200", Activations.FLOAT32)
    assert uncapturable(wide, 1) is not None
    reference = plan_of("gpt-oss-20b", "h200", Activations.BF16, backend="reference")
    ops = Ops(KNOWN["h200"], Activations.BF16, Preference("reference"), plan=reference)
    reason = ops.uncapturable(4)
    assert reason is not None
    assert "reference" in reason
    assert "on the host" in reason


@pytest.mark.skipif(ON_GPU, reason="the engine's own tests capture whole steps there")
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("card", [pytest.param("a100", marks=pytest.mark.nightly), "h200", "rtx5090"])
@pytest.mark.parametrize("model", ["gpt-oss-20b", "gemma-4-26b-a4b", "qwen3-30b-a3b"])
def test_a_decoding_step_reads_nothing_on_the_host(model: str, card: str, rows: int) -> None:
    """All of a model's own code too, and what has launches of its own only in company."""
    own = "num_local_experts" if "gpt-oss" in model else "num_experts"
    small = {"num_hidden_layers": 6, own: 8, "hidden_size": 256, "vocab_size": 512}
    weights = open_weights(model, load_format="dummy", overrides=small)
    ops = Ops(KNOWN[card], Activations.BF16, Preference())
    built = build_model(weights, ops, torch.device("cpu"), 16, lambda: None)
    assert ops.uncapturable(rows) is None
    pools = {kind: PagePool(rows) for kind in PAGED}
    inputs = StepInputs(
        pools, 16, max_tokens=rows, max_sequences=rows, max_rows=rows, max_pages=4, device=torch.device("cpu")
    )
    plan = []
    for row in range(rows):
        request = Request(str(row), [1, 2, 3], SamplingParams())
        for pool in pools.values():
            pool.grow(request.request_id, 1)
        plan.append(Work(request, 2, 1))
    key = Step(rows, rows, 1, 4)
    inputs.fill(plan, key)
    kv = built.new_cache(dict.fromkeys(LayerKind, rows + 1))
    check_capturable(partial(built.forward, inputs.batch(key), kv))
