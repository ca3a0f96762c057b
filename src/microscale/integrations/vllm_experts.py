"""Microscale's expert layers behind vLLM's quantisation methods. Imports vLLM: only ``integrations.vllm`` loads it.

vLLM has no registry of expert kernels, but its table of quantisation configs may be overwritten. Ours are vLLM's own
configs with one answer changed: for an expert layer that the oracle can decide, the method is ours. It inherits the
parameters and with them vLLM's loader and sharding, packs once they are filled, and runs the ``moe`` op.

    vLLM                                           here
    RoutedExperts.__init__ → get_quant_method      spec_of → decided: a plan, or a reason and vLLM's own method
                           → create_weights        vLLM's own, the width rounded up to a block with zeros
    loader → process_weights_after_loading         the bytes as BlockScaled → Ops.moe, vLLM's copies freed
    MoERunner → router → apply                     expert ids of this rank → the bound op
    MoERunner → all-reduce, combine                vLLM's own

All decisions are made before the weights are read, so stepping aside costs nothing. ``apply`` neither waits for the
host nor looks at values, and on a GPU vLLM calls it inside a custom op of its own: graphs and ``torch.compile`` need
nothing from us.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config, ModelOptMxFp8FusedMoE
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config, GptOssMxfp4MoEMethod
from vllm.platforms import current_platform

from microscale.errors import Unsupported
from microscale.formats import BLOCK, MXFP4, MXFP8, BlockFormat, BlockScaled
from microscale.hardware import Gpu, cpu, detect
from microscale.integrations.vllm_warming import finish_warming, start_warming
from microscale.kernels.op import Activations
from microscale.planning.decision import Plan
from microscale.planning.ops import Gate, GateKind, Moe, MoeSpec, MoeWeights, Ops, Preference, Routing, Use
from microscale.planning.plan import Setup, decide_use
from microscale.planning.shards import padded_width, record_moe

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("vllm.microscale")

LAYER = "experts"
GATES = {
    MXFP4: {"swigluoai": Gate(GateKind.SWIGLU_CLAMPED, interleaved=True)},
    MXFP8: {"gelu_tanh": Gate(GateKind.GELU_TANH, interleaved=False)},
}
"""Format → vLLM's activation → our gate, as that format's checkpoints arrange its rows. The constants of ``swigluoai``
are fixed in vLLM too."""
DISPATCHES = ("allgather_reducescatter", "naive")
"""vLLM's ways to bring tokens to the ranks of their experts that leave the expert layer to the method."""
CPU_ROUTER = "vllm.model_executor.layers.fused_moe.router.cpu_router"
WEIGHTS = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", "w13_bias", "w2_bias")


def register() -> None:
    """Replace vLLM's configs by ours under the same names: vLLM's loaders branch on them."""
    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise Unsupported(f"it has kernels for NVIDIA GPUs, and vLLM runs on {current_platform.device_name}.")
    register_quantization_config("gpt_oss_mxfp4")(MicroscaleMxfp4Config)
    register_quantization_config("modelopt_mxfp8")(MicroscaleMxfp8Config)


def spec_of(layer: RoutedExperts, fmt: BlockFormat) -> MoeSpec:
    """The spec of one of vLLM's expert layers on this rank, or ``Unsupported`` with the reason."""
    moe, parallel = layer.moe_config, layer.moe_config.moe_parallel_config
    activation, gates = moe.activation.value, GATES[fmt]
    if activation not in gates:
        raise Unsupported(f"the {fmt.name} experts' gate is {activation}, and the plug-in knows {', '.join(gates)}.")
    gate = gates[activation]
    if gate.kind is GateKind.SWIGLU_CLAMPED and moe.swiglu_limit not in (None, gate.limit):
        raise Unsupported(f"the gate is clamped at {moe.swiglu_limit}, and vLLM's own methods clamp at {gate.limit}.")
    if moe.in_dtype != torch.bfloat16:
        raise Unsupported(f"the activations are {moe.in_dtype}, and the kernels read bfloat16.")
    if moe.moe_backend != "auto":
        raise Unsupported(f"--moe-backend {moe.moe_backend} was asked for.")
    if moe.is_lora_enabled:
        raise Unsupported("adapters (LoRA) reach into the experts.")
    if layer.apply_router_weight_on_input:
        raise Unsupported("the router's weights go on the experts' input, and the kernels put them on the output.")
    if parallel.enable_eplb:
        raise Unsupported("expert load balancing moves weights after they are packed.")
    dispatched = parallel.use_all2all_kernels or parallel.all2all_backend == "passthrough"  # for any parallelism
    if dispatched and parallel.all2all_backend not in DISPATCHES:
        raise Unsupported(f"--all2all-backend {parallel.all2all_backend} needs experts of its own shape.")
    width, odd = moe.intermediate_size_per_partition, moe.intermediate_size_per_partition % BLOCK
    if odd and fmt is not MXFP4:
        # The loader cuts rows and scales by the same fraction, and a block of 32 has one scale.
        raise Unsupported(f"a shard of {moe.intermediate_size} / {parallel.tp_size} = {width} cuts a block of {BLOCK}.")
    return MoeSpec(
        num_experts=moe.num_local_experts + spare_experts(layer),
        top_k=moe.experts_per_token,
        hidden=moe.hidden_dim,
        intermediate=padded_width(width),
        weight_format=fmt.name,
        activations=Activations.BF16,
        gate=gate,
        bias=moe.has_bias,
        tokens=1,
    )


@cache
def decided(spec: MoeSpec) -> tuple[Gpu, Plan]:
    """The oracle's plan for the experts on this process's device; logged when it is made."""
    gpu = cpu() if current_platform.is_cpu() else detect(torch.cuda.current_device())
    if gpu.is_cpu and importlib.util.find_spec(CPU_ROUTER) is None:
        raise Unsupported("this vLLM routes on a CPU only inside its own experts; from 0.30 on it does before them.")
    if gpu.is_cpu and not get_current_vllm_config().model_config.enforce_eager:
        raise Unsupported("on a CPU the experts are plain torch that cannot be compiled; add --enforce-eager.")
    plan = plan_for(spec, gpu)
    if not gpu.is_cpu:
        start_warming(spec, gpu, get_current_vllm_config().scheduler_config.max_num_batched_tokens)
    logger.info("Microscale runs the experts on %s (MICROSCALE_VLLM=off: vLLM's own).\n%s", gpu.name, _text(plan))
    return gpu, plan


def plan_for(spec: MoeSpec, gpu: Gpu) -> Plan:
    """The oracle's decisions. Raises ``Unsupported`` where one is not a kernel that a graph can hold."""
    plan = Plan()
    plan.add(decide_use(Use("moe", LAYER, spec), Setup(gpu, spec.activations)))
    for decision in plan.of("moe", LAYER):
        # Plain torch starts none of our kernels: its loop over experts reads the routing back.
        if not gpu.is_cpu and not record_moe(spec, gpu, (decision.tokens,)):
            raise Unsupported(f"on {gpu.name} only {decision.chosen} runs this, which waits for the host.")
    return plan


def _text(plan: Plan) -> str:
    """Which implementation runs how many tokens, and why the others do not."""
    return "\n".join((plan.table(), *_reasons(plan)))


def _reasons(plan: Plan) -> Iterator[str]:
    for span in plan.spans("moe", LAYER):
        for rejected in span.decisions[-1].rejected:
            yield f"    {span.last} tokens, not {rejected.name}: {rejected.reason}"


@cache
def _leave_to_vllm(reason: str) -> None:
    """Logged once, not for every layer."""
    logger.warning("Microscale leaves these experts to vLLM: %s", reason)


def _can_run(layer: torch.nn.Module, fmt: BlockFormat) -> bool:
    """Whether our method can run this layer; if not, the reason is logged."""
    if not isinstance(layer, RoutedExperts):
        return False
    try:
        decided(spec_of(layer, fmt))
    except Exception as error:
        _leave_to_vllm(str(error) if isinstance(error, Unsupported) else f"{type(error).__name__}: {error}")
        return False
    return True


class MicroscaleMxfp4Config(GptOssMxfp4Config):
    """gpt-oss in MXFP4. A class of this module, since vLLM sends it to its engine process by name."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return MicroscaleMxfp4Method(layer) if _can_run(layer, MXFP4) else super().get_quant_method(layer, prefix)


class MicroscaleMxfp8Config(ModelOptMxFp8Config):
    """modelopt's MXFP8: dense layers stay vLLM's."""

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if self.is_layer_excluded(prefix) or not _can_run(layer, MXFP8):
            return super().get_quant_method(layer, prefix)
        return MicroscaleMxfp8Method(layer)


class _Experts(FusedMoEMethodBase):
    """What both formats share. Subclasses also inherit the vLLM method that creates the parameters."""

    format: BlockFormat

    def __init__(self, layer: RoutedExperts) -> None:
        # Not the other base class's: it would ask vLLM's own oracle, which may have nothing for this GPU.
        FusedMoEMethodBase.__init__(self, layer.moe_config)
        self._spec = spec_of(layer, self.format)
        self._gpu, self._plan = decided(self._spec)
        self._moe: Moe | None = None
        self._instead: Tensor | None = None

    # The other base class derives these from vLLM's backend, which was never chosen.
    is_monolithic = property(lambda self: False)
    skip_forward_padding = property(lambda self: False)
    has_unpadded_output = property(lambda self: False)

    def maybe_roundup_sizes(self, hidden_size: int, width: int, *unused: Any, **also_unused: Any) -> tuple[int, int]:
        """vLLM's shards of gpt-oss are whole blocks: the last rank has fewer, and the rest of its rows stays zero."""
        return hidden_size, padded_width(width)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Only vLLM's own kernels have one."""

    def maybe_make_prepare_finalize(self, *unused: Any, **also_unused: Any) -> None:
        """Before 0.27: our kernels need no prepared tokens, since vLLM dispatches before ``apply``."""

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        if layer.w13_weight.numel() == 0:  # bound before; vLLM may call twice
            return
        begun = time.perf_counter()
        self._instead = stand_ins(layer)  # not in apply: nothing may be allocated while a graph is captured
        ops = Ops(self._gpu, self._spec.activations, Preference(), plan=self._plan)
        self._moe = ops.moe(weights_of(layer, self.format), self._spec.top_k, self._spec.gate)
        for name in WEIGHTS:
            held = getattr(layer, name, None)
            if held is not None:
                layer.register_parameter(name, torch.nn.Parameter(held.new_empty(0), requires_grad=False))
        # Packing ends with a synchronisation, so this includes the device's time.
        logger.debug("Microscale packed an expert layer in %.0f ms.", 1e3 * (time.perf_counter() - begun))

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """The routed experts of this rank. vLLM runs the shared experts itself."""
        if self._moe is None or self._instead is None:
            raise Unsupported("vLLM runs a layer whose weights it has not loaded.")
        finish_warming(self._spec)
        routing = Routing(topk_ids.to(torch.int32).contiguous(), topk_weights.to(torch.float32).contiguous())
        return self._moe(x, local_routing(routing, self._instead, layer.expert_map))


class MicroscaleMxfp4Method(_Experts, GptOssMxfp4MoEMethod):
    format = MXFP4
    weight_dtype = "gpt_oss_mxfp4"
    """Read by vLLM's loader of gpt-oss."""


class MicroscaleMxfp8Method(_Experts, ModelOptMxFp8FusedMoE):
    format = MXFP8


def weights_of(layer: RoutedExperts, fmt: BlockFormat) -> MoeWeights:
    """vLLM's parameters as our record, the spare experts after the real ones."""
    spare = spare_experts(layer)

    def tensor(name: str) -> Tensor | None:
        held = getattr(layer, name, None)
        if held is None:
            return None
        held = held.data if held.dtype == torch.bfloat16 else held.data.view(torch.uint8)
        return torch.cat((held, held.new_zeros(spare, *held.shape[1:]))) if spare else held

    def matrix(name: str) -> BlockScaled:
        values, scales = tensor(f"{name}_weight"), tensor(f"{name}_weight_scale")
        assert values is not None  # vLLM's create_weights made both
        assert scales is not None
        return BlockScaled(values, scales, fmt)

    return MoeWeights(matrix("w13"), matrix("w2"), tensor("w13_bias"), tensor("w2_bias"))


def spare_experts(layer: RoutedExperts) -> int:
    """The number of zero experts that replace those of other ranks: one for each expert of a token, since a token may
    name an expert only once."""
    # Not layer.expert_map: it asks the method, which is still being chosen.
    return int(layer.moe_config.experts_per_token) if layer.expert_map_manager.expert_map is not None else 0


def stand_ins(layer: RoutedExperts) -> Tensor:
    """Ids of this rank's experts that replace those of other ranks, one for each slot of a token."""
    first = layer.moe_config.num_local_experts if spare_experts(layer) else 0
    slots = torch.arange(layer.moe_config.experts_per_token, dtype=torch.int32, device=layer.w13_weight.device)
    return slots + first


def local_routing(routing: Routing, instead: Tensor, expert_map: Tensor | None) -> Routing:
    """The routing over this rank's experts. Kernels read the weights of every id, and each id of a row once.

    vLLM marks the padding rows of a graph with ids of -1: they go to ``instead``, and their results are dropped. Ids of
    another rank's experts go there too, to spare experts and with weight 0.
    """
    ids, weights = routing.expert_ids, routing.weights
    if expert_map is None:
        return Routing(torch.where(ids < 0, instead, ids), weights)
    local = expert_map.to(torch.int32)[ids.clamp(min=0).long()]
    elsewhere = (ids < 0) | (local < 0)
    return Routing(torch.where(elsewhere, instead, local), weights.masked_fill(elsewhere, 0.0))
