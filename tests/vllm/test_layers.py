"""The plug-in on vLLM's own layers: its config, its loader, its shards and expert maps; no engine around them."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig, RoutingMethodType
from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from microscale import hardware
from microscale.formats import block_format
from microscale.integrations import vllm as plugin
from microscale.integrations import vllm_experts
from microscale.kernels.moe.reference import moe
from microscale.kernels.moe.spec import MoeWeights, Routing
from microscale_lab.cases.errors import check_rounded
from microscale_lab.cases.experts import GELU, ExpertsInput, make_routing, make_tokens, make_weights
from support.cpu_flags import NEEDS_AMX
from support.tiny_checkpoints import CASES, write_hf


@dataclass(frozen=True)
class Split:
    """How the ranks divide the experts: each one's width (``tp``), or the experts themselves (``ep``)."""

    tp: int = 1
    ep: int = 1
    rank: int = 0

    def ranks(self) -> Iterator[Split]:
        return (replace(self, rank=rank) for rank in range(self.tp * self.ep))

    def config(self) -> FusedMoEParallelConfig:
        return FusedMoEParallelConfig(
            tp_size=self.tp,
            tp_rank=self.rank if self.tp > 1 else 0,
            ep_size=self.ep,
            ep_rank=self.rank if self.ep > 1 else 0,
            use_ep=self.ep > 1,
            pcp_size=1,
            pcp_rank=0,
            dp_size=1,
            dp_rank=0,
            sp_size=1,
            all2all_backend="allgather_reducescatter",
            enable_eplb=False,
        )


@pytest.fixture(scope="session", autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The process groups that vLLM's parameters ask, of one process."""
    meeting = tmp_path_factory.mktemp("group") / "file"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, backend="gloo")
        initialize_model_parallel()


@pytest.fixture(autouse=True)
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The plug-in as an engine calls it: registered, with vLLM's config at hand."""
    plugin.register()
    folder = write_hf(tmp_path_factory.mktemp("model"), CASES["heads_6_3"])
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16")
    with set_current_vllm_config(VllmConfig(model_config=model)):
        yield


def config_of(fmt: str) -> Any:
    if fmt == "mxfp4":
        return get_quantization_config("gpt_oss_mxfp4")()
    return get_quantization_config("modelopt_mxfp8").from_config({"quant_method": "modelopt", "quant_algo": "MXFP8"})


def make_layer(case: ExpertsInput, fmt: str, split: Split, **changes: object) -> RoutedExperts:
    """vLLM's expert layer of one rank, without weights."""
    parallel = split.config()
    maps = ExpertMapManager(
        max_num_batched_tokens=64,
        top_k=case.top_k,
        global_num_experts=case.num_experts,
        num_redundant_experts=0,
        num_expert_group=None,
        moe_parallel_config=parallel,
        placement_strategy="linear",
        enable_eplb=False,
    )
    options: dict[str, object] = {
        "activation": MoEActivation.GELU_TANH if case.gate == GELU else MoEActivation.SWIGLUOAI,
        "in_dtype": torch.bfloat16,
        "has_bias": case.bias,
        "device": "cpu",
    }
    moe_config = FusedMoEConfig(
        num_experts=case.num_experts,
        experts_per_token=case.top_k,
        hidden_dim=case.hidden,
        intermediate_size=case.intermediate,
        num_local_experts=maps.local_num_experts,
        num_logical_experts=case.num_experts,
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        **(options | changes),
    )
    kind = GptOssRoutedExperts if fmt == "mxfp4" else RoutedExperts
    with torch.device(moe_config.device):
        return kind("model.layers.0.experts", torch.bfloat16, moe_config, config_of(fmt), maps)


def load(layer: RoutedExperts, weights: MoeWeights) -> None:
    """The checkpoint's tensors through vLLM's own loader, expert by expert."""
    four_bits = isinstance(layer, GptOssRoutedExperts)
    parts: list[tuple[str, str, Tensor]] = []
    for name, matrix, bias in (("w13", weights.gate_up, weights.gate_up_bias), ("w2", weights.down, weights.down_bias)):
        values = matrix.values if four_bits else matrix.values.view(torch.float8_e4m3fn)
        for suffix, tensor in (("weight", values), ("weight_scale", matrix.scales), ("bias", bias)):
            if tensor is None:
                continue
            halves = [(f"gpt_oss_{name}", tensor)] if four_bits else [(name, tensor)]
            if halves[0][0] == "w13":
                halves = list(zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True))
            parts += [(f"{name}_{suffix}", shard, part) for shard, part in halves]
    for name, shard, tensor in parts:
        for expert, loaded in enumerate(tensor):
            param = getattr(layer, name)
            layer.weight_loader(param, loaded, f"experts.{name}", shard, expert)
    layer.quant_method.process_weights_after_loading(layer)


def run(layer: RoutedExperts, x: Tensor, routing: Routing) -> Tensor:
    """What this rank adds, as vLLM's runner asks for it."""
    out: Tensor = layer.forward_modular(x, routing.weights, routing.expert_ids.long())
    return out


# gpt-oss: 2880 / 2 = 45 blocks of 32, / 4 = 22.5, / 8 = 11.25. modelopt's shards must be whole blocks.
GPT_OSS = ExpertsInput("gpt-oss's width", 7, num_experts=3, top_k=2, hidden=64, intermediate=2880)
GEMMA = ExpertsInput("Gemma's width", 7, num_experts=3, top_k=2, hidden=64, intermediate=704, gate=GELU, bias=False)
NARROW = ExpertsInput("experts apart", 9, num_experts=7, top_k=3, hidden=64, intermediate=96)


@pytest.mark.parametrize(
    ("case", "fmt", "split", "widths"),
    [
        pytest.param(GPT_OSS, "mxfp4", Split(), {2880}, id="mxfp4 whole"),
        pytest.param(GPT_OSS, "mxfp4", Split(tp=2), {1440}, id="mxfp4 1440"),
        pytest.param(GPT_OSS, "mxfp4", Split(tp=4), {736}, id="mxfp4 720 padded"),
        pytest.param(GPT_OSS, "mxfp4", Split(tp=8), {384}, id="mxfp4 360 padded"),
        pytest.param(NARROW, "mxfp4", Split(ep=3), {96}, id="mxfp4 experts apart"),
        pytest.param(GEMMA, "mxfp8", Split(), {704}, id="mxfp8 whole"),
        pytest.param(GEMMA, "mxfp8", Split(tp=2), {352}, id="mxfp8 352"),
        pytest.param(replace(GEMMA, num_experts=5), "mxfp8", Split(ep=2), {704}, id="mxfp8 experts apart"),
    ],
)
def test_ranks_add_up(case: ExpertsInput, fmt: str, split: Split, widths: set[int]) -> None:
    weights, x, routing = make_weights(case, fmt, "cpu"), make_tokens(case, "cpu"), make_routing(case, "cpu")
    total = torch.zeros(case.tokens, case.hidden)
    for rank in split.ranks():
        layer = make_layer(case, fmt, rank)
        assert type(layer.quant_method).__module__ == vllm_experts.__name__
        assert layer.intermediate_size_per_partition in widths
        assert layer.w13_weight.dtype == (torch.uint8 if fmt == "mxfp4" else torch.float8_e4m3fn)
        load(layer, weights)
        assert layer.w13_weight.numel() == 0, "vLLM's copy of the weights is let go"
        y = run(layer, x, routing)
        assert y.dtype == torch.bfloat16
        total += y.float()
    # Each rank rounds h, a and its part of y to bf16.
    check_rounded(total, moe(x, weights, routing, case.gate), "bf16", 3)


@pytest.mark.parametrize(
    ("fmt", "split", "changes", "reason"),
    [
        ("mxfp8", Split(tp=4), {}, "a shard of 704 / 4 = 176 cuts a block of 32."),
        (
            "mxfp8",
            Split(),
            {"activation": MoEActivation.SILU},
            "the mxfp8 experts' gate is silu",
        ),
        ("mxfp8", Split(), {"in_dtype": torch.float16}, "the activations are torch.float16"),
        ("mxfp8", Split(), {"moe_backend": "marlin"}, "--moe-backend marlin was asked for."),
        ("mxfp8", Split(), {"is_lora_enabled": True}, "adapters (LoRA) reach into the experts."),
    ],
)
def test_steps_aside_with_the_reason(
    fmt: str, split: Split, changes: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    vllm_experts._leave_to_vllm.cache_clear()
    logging.getLogger("vllm").propagate = True
    caplog.set_level(logging.WARNING, "vllm.microscale")
    # vLLM then looks for a kernel of its own; for some of these it has none on a CPU, and says so.
    with suppress(ValueError, NotImplementedError):
        layer = make_layer(GEMMA, fmt, split, **changes)
        assert type(layer.quant_method).__module__.startswith("vllm.")
    assert [m for m in caplog.messages if m.startswith("Microscale leaves these experts to vLLM: " + reason)]


def test_layers_that_are_no_experts_stay_vllms() -> None:
    config = config_of("mxfp4")
    linear = ReplicatedLinear(32, 32, disable_tp=True)
    assert type(config.get_quant_method(linear, "model.layers.0.o_proj")).__module__.startswith("vllm.")


def test_the_configs_travel_between_processes() -> None:
    for fmt in ("mxfp4", "mxfp8"):
        config = config_of(fmt)
        assert type(pickle.loads(pickle.dumps(config))) is type(config)


def test_ids_of_other_ranks_become_spare_experts() -> None:
    """Each once in a row, with weight 0. A row of -1 only fills up a graph."""
    ids = torch.tensor([[0, 3, 5], [1, 2, 4], [-1, -1, -1]], dtype=torch.int32)
    routing = Routing(ids, torch.full((3, 3), 0.25))
    here = torch.tensor([-1, -1, -1, 0, 1, 2], dtype=torch.int32)
    local = vllm_experts.local_routing(routing, torch.tensor([3, 4, 5], dtype=torch.int32), here)
    assert local.expert_ids.tolist() == [[3, 0, 2], [3, 4, 1], [3, 4, 5]]
    assert local.weights.tolist() == [[0.0, 0.25, 0.25], [0.0, 0.0, 0.25], [0.0, 0.0, 0.0]]
    whole = vllm_experts.local_routing(routing, torch.tensor([0, 1, 2], dtype=torch.int32), None)
    assert whole.expert_ids.tolist() == [[0, 3, 5], [1, 2, 4], [0, 1, 2]]


@pytest.mark.parametrize("split", [Split(), Split(ep=2)], ids=["together", "experts apart"])
def test_rows_that_fill_up_a_graph_change_no_other(split: Split) -> None:
    case = replace(NARROW, tokens=6)
    weights, x, routing = make_weights(case, "mxfp4", "cpu"), make_tokens(case, "cpu"), make_routing(case, "cpu")
    layer = make_layer(case, "mxfp4", split)
    load(layer, weights)
    marked = routing.expert_ids.index_fill(0, torch.tensor([4, 5]), -1)
    assert torch.equal(run(layer, x, Routing(marked, routing.weights))[:4], run(layer, x, routing)[:4])


@pytest.mark.parametrize(
    "gpu", [hardware.KNOWN[name] for name in hardware.REPRESENTATIVES], ids=hardware.REPRESENTATIVES
)
def test_every_card_has_kernels_for_every_shard(gpu: hardware.Gpu) -> None:
    """gpt-oss-120b and Gemma 4's experts, whole, cut and apart: what vLLM asks for is decided for our kernels."""
    large = ExpertsInput("gpt-oss-120b", 1, num_experts=128, top_k=4, hidden=2880, intermediate=2880)
    layers = [(large, "mxfp4", Split(tp=tp)) for tp in (1, 2, 4, 8)]
    layers += [(large, "mxfp4", Split(ep=ep)) for ep in (2, 8)]
    gemma = ExpertsInput("Gemma 4", 1, num_experts=128, top_k=8, hidden=2816, intermediate=704, gate=GELU, bias=False)
    layers += [(gemma, "mxfp8", Split(tp=tp)) for tp in (1, 2)]
    for case, fmt, split in layers:
        layer = make_layer(case, fmt, split, device="meta")
        plan = vllm_experts.plan_for(vllm_experts.spec_of(layer, block_format(fmt)), gpu)
        assert {decision.chosen for decision in plan.of("moe", "experts")} <= {"triton_w4a16", "triton_w8a16"}


def test_the_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    vllm_experts.decided.cache_clear()
    logging.getLogger("vllm").propagate = True
    caplog.set_level(logging.INFO, "vllm.microscale")
    for _ in range(2):
        make_layer(NARROW, "mxfp4", Split())
    (message,) = [m for m in caplog.messages if "runs the experts" in m]
    assert "dequantized" in message
    assert "not triton_w4a16: needs bf16 matrix units, which CPU does not have" in message


@NEEDS_AMX
def test_a_compiled_model_on_a_cpu_is_vllms(tmp_path: Path) -> None:
    vllm_experts.decided.cache_clear()
    folder = write_hf(tmp_path, CASES["heads_6_3"])
    model = ModelConfig(model=str(folder), skip_tokenizer_init=True, enforce_eager=False, dtype="bfloat16")
    with set_current_vllm_config(VllmConfig(model_config=model)):
        layer = make_layer(NARROW, "mxfp4", Split())
    assert type(layer.quant_method).__module__.startswith("vllm.")
