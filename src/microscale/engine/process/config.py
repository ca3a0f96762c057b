"""``EngineConfig``, the message, as the options of a load, and back."""

from __future__ import annotations

from microscale.backends.ops import Preference
from microscale.backends.precision import make_precision
from microscale.engine.loading.memory import Workload
from microscale.engine.loading.options import LoadOptions
from microscale.engine.process.messages import EngineConfig
from microscale.engine.speculation.config import config_text, parse_config
from microscale.parallel.handshake import Nodes


def load_options(config: EngineConfig) -> LoadOptions:
    return LoadOptions(
        model=config.model,
        load_format=config.load_format,
        device=config.device,
        dtype=config.dtype,
        preference=Preference(config.backend, config.moe_backend),
        precision=make_precision(config.precision, config.layer_format, config.moe_activations, config.kv_cache_dtype),
        workload=Workload(
            context=config.max_model_len,
            sequences=config.max_num_seqs,
            step_tokens=config.max_num_batched_tokens,
            page_size=config.block_size,
            utilization=config.gpu_memory_utilization,
            reserve=config.reserve_memory,
        ),
        overrides=config.hf_overrides,
        offline=config.offline,
        seed=config.seed,
        speculative=parse_config(config.speculative_config),
        threads=config.threads,
        tensor_parallel_size=config.tensor_parallel_size,
        nodes=_nodes(config),
    )


def engine_config(options: LoadOptions) -> EngineConfig:
    """What another process needs to have the same options."""
    work, precision, speculative = options.workload, options.precision, options.speculative
    return EngineConfig(
        model=options.model,
        load_format=str(options.load_format),
        device=options.device,
        dtype=options.dtype,
        backend=options.preference.backend,
        moe_backend=options.preference.moe_backend,
        precision=precision.name,
        layer_format=tuple(f"{layer}={fmt}" for layer, fmt in precision.chosen),
        moe_activations=precision.moe_activations,
        kv_cache_dtype=precision.kv_cache_dtype,
        hf_overrides=dict(options.overrides),
        max_model_len=work.context,
        max_num_seqs=work.sequences,
        max_num_batched_tokens=work.step_tokens,
        block_size=work.page_size,
        gpu_memory_utilization=work.utilization,
        reserve_memory=work.reserve,
        offline=options.offline,
        seed=options.seed,
        speculative_config=None if speculative is None else config_text(speculative),
        threads=options.threads,
        tensor_parallel_size=options.tensor_parallel_size,
    )


def _nodes(config: EngineConfig) -> Nodes | None:
    if config.nnodes == 1:
        return None
    return Nodes(config.nnodes, config.master_addr, config.master_port, config.rank_secret_file)
