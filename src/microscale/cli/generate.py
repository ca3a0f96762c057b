"""``microscale generate``: token ids in, token ids out."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from microscale import settings
from microscale.cli.bars import load_with_progress, progress_bar
from microscale.cli.console import parse_numbers, print_json, show_log
from microscale.cli.help import batching_option, memory_option, output_option, sampling_option
from microscale.cli.options import (
    MODEL_HELP,
    BackendOption,
    DeviceOption,
    DtypeOption,
    KvCacheDtypeOption,
    LayerFormatOption,
    LoadFormatOption,
    MoeActivationsOption,
    MoeBackendOption,
    OverridesOption,
    PrecisionOption,
    ReserveOption,
    SpeculativeOption,
    TensorParallelOption,
    ThreadsOption,
    UtilizationOption,
    YesOption,
    parse_overrides,
    reserve_in_bytes,
)
from microscale.engine.config import EngineConfig
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import parse_config
from microscale.errors import BadSetting
from microscale.models.config import LoadFormat


def generate(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP}.")],
    prompt_ids: Annotated[str, sampling_option(help="The prompt's token ids, such as 1,2,3.")],
    max_tokens: Annotated[int, sampling_option(help="Maximum number of new tokens.")] = 16,
    temperature: Annotated[float, sampling_option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, sampling_option(help="Seed for sampling. Default: random.")] = None,
    ignore_eos: Annotated[bool, sampling_option("--ignore-eos", help="Continue after an end token.")] = False,
    load_format: LoadFormatOption = LoadFormat.AUTO,
    hf_overrides: OverridesOption = None,
    device: DeviceOption = "auto",
    yes: YesOption = False,
    dtype: DtypeOption = "auto",
    backend: BackendOption = None,
    moe_backend: MoeBackendOption = None,
    precision: PrecisionOption = "exact",
    layer_format: LayerFormatOption = None,
    moe_activations: MoeActivationsOption = "auto",
    kv_cache_dtype: KvCacheDtypeOption = "auto",
    max_model_len: Annotated[
        int | None,
        memory_option(help="Maximum tokens of prompt and completion together. Default: what this prompt needs."),
    ] = None,
    gpu_memory_utilization: UtilizationOption = 0.9,
    reserve_memory: ReserveOption = None,
    block_size: Annotated[int, memory_option(help="Tokens in one page of the KV cache.")] = 16,
    max_num_batched_tokens: Annotated[
        int, batching_option(help="Maximum number of tokens in one step; longer prompts run in chunks.")
    ] = 2048,
    threads: ThreadsOption = None,
    speculative_config: SpeculativeOption = None,
    tensor_parallel_size: TensorParallelOption = 1,
    as_json: Annotated[
        bool, output_option("--json", help="Print token_ids, logprobs and finish_reason as JSON.")
    ] = False,
) -> None:
    """Generate token ids from token ids, without a tokenizer.

    Try it on the embedded model: microscale generate demo --prompt-ids 5,6,7
    """
    env = settings.load()
    prompt = parse_numbers("--prompt-ids", prompt_ids)
    params = SamplingParams(max_tokens, temperature, seed, ignore_eos)
    check_length(prompt, max_tokens, max_model_len)
    options = EngineConfig(
        model=model,
        load_format=load_format.value,
        device=device,
        allow_slow=yes,
        dtype=dtype,
        backend=backend,
        moe_backend=moe_backend,
        precision=precision,
        layer_format=tuple(layer_format or ()),
        moe_activations=moe_activations,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len or len(prompt) + max_tokens,
        max_num_seqs=1,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        reserve_memory=reserve_in_bytes(reserve_memory),
        hf_overrides=parse_overrides(hf_overrides),
        offline=env.offline,
        threads=threads,
        tensor_parallel_size=tensor_parallel_size,
        speculative=parse_config(speculative_config),
    )

    from microscale.engine.generate import Generation, check_budget, check_prompt
    from microscale.engine.loading.build import load_speculation
    from microscale.engine.loading.prepare import prepare
    from microscale.models.recorded import Wanted

    check_budget(max_num_batched_tokens)
    show_log()
    prepared = prepare(options, lambda config: check_prompt(prompt, max_tokens, config))
    with closing(prepared):
        wanted = Wanted(min(len(prompt), max_num_batched_tokens), draws=params.temperature > 0)
        loaded = load_with_progress(prepared, wanted)
        speculation = load_speculation(prepared, loaded)
        generation = Generation(
            loaded, [prompt], params, max_num_batched_tokens, speculation=speculation, team=prepared.team
        )
        with progress_bar("Generating") as (start, advance):
            start(max_tokens)
            completion = generation.run(on_step=advance)[0]
    if as_json:
        print_json(
            {
                "token_ids": completion.token_ids,
                "logprobs": completion.logprobs,
                "finish_reason": completion.finish_reason,
            }
        )
    else:
        print(",".join(map(str, completion.token_ids)))


def check_length(prompt: list[int], max_tokens: int, max_model_len: int | None) -> None:
    """Refuse a request that is longer than what was reserved for it."""
    wanted = len(prompt) + max_tokens
    if max_model_len is not None and wanted > max_model_len:
        raise BadSetting(
            f"--max-model-len {max_model_len} is less than the {len(prompt)} prompt tokens and {max_tokens} new ones; "
            f"{wanted} would do."
        )
