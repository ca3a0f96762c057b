"""``microscale serve``: OpenAI's API over HTTP."""

from __future__ import annotations

import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from microscale import settings
from microscale.cli.asking import USUAL_URL
from microscale.cli.console import err, print_wrapped, show_log
from microscale.cli.help import (
    batching_option,
    device_option,
    gpus_option,
    limit_option,
    memory_option,
    model_option,
    network_option,
)
from microscale.cli.loading import engine_in_terminal
from microscale.cli.options import (
    MODEL_HELP,
    BackendOption,
    BlockSizeOption,
    DeviceOption,
    DtypeOption,
    KernelCacheOption,
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
from microscale.engine.client.launch import EngineProcess
from microscale.engine.config import EngineConfig
from microscale.engine.protocol.messages import Ready
from microscale.engine.speculation.config import parse_config
from microscale.errors import BadSetting
from microscale.models import embedded
from microscale.models.config import LoadFormat
from microscale.parallel.handshake import Nodes, read_secret
from microscale.server.options import RequestLimits, ServeOptions, read_keys, read_origins

DEFAULTS = RequestLimits()
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Annotated[str, typer.Argument(help=f"{MODEL_HELP}.")] = embedded.NAME,
    host: Annotated[
        str, network_option(help="The address to listen on; 0.0.0.0 accepts other machines.")
    ] = "127.0.0.1",
    port: Annotated[int, network_option(help="The port to listen on; 0 chooses a free one.", min=0, max=65535)] = 8000,
    served_model_name: Annotated[
        list[str] | None, model_option(help="The model's name in requests and replies. Repeatable. Default: MODEL.")
    ] = None,
    api_key: Annotated[
        list[str] | None, network_option(help="A key that requests must carry. Repeatable. It is visible in `ps`.")
    ] = None,
    api_key_file: Annotated[Path | None, network_option(help="A file of keys, one per line.")] = None,
    allowed_host: Annotated[
        list[str] | None,
        network_option(
            help="A Host name to accept as well as localhost, for a proxy on this machine; * accepts any. Repeatable."
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        network_option(
            help="An origin whose pages may call this server, such as https://chat.example; * needs a key. Repeatable."
        ),
    ] = None,
    strict_requests: Annotated[
        bool, network_option("--strict-requests", help="Refuse unknown keys in requests instead of ignoring them.")
    ] = False,
    tokenizer: Annotated[str | None, model_option(help="The folder of tokenizer.json. Default: the model's.")] = None,
    chat_template: Annotated[
        Path | None, model_option(help="A Jinja file to use instead of the checkpoint's chat template.")
    ] = None,
    generation_config: Annotated[
        str,
        model_option(
            metavar="auto|none|FOLDER",
            help="Where sampling defaults come from: the model's generation_config.json (auto), OpenAI's defaults "
            "(none), or that file in another folder. A request's own values always win.",
        ),
    ] = "auto",
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
        int | None, memory_option(help="Maximum tokens of prompt and answer together. Default: what fits.", min=1)
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        batching_option(
            help="Maximum number of sequences in a batch. The KV cache must hold 1024 tokens of each, and "
            "--max-model-len of one. Default: 64, on GPUs 128 or 256 if 4096 tokens of each fit.",
            min=1,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[int, batching_option(help="Maximum number of tokens in one step.", min=1)] = 2048,
    max_queue: Annotated[
        int, batching_option(help="Maximum queue length. Further requests get HTTP 429.", min=1)
    ] = 1024,
    enable_prefix_caching: Annotated[bool, memory_option(help="Reuse the KV cache of common prompt prefixes.")] = True,
    enforce_eager: Annotated[bool, device_option("--enforce-eager", help="Do not use CUDA graphs.")] = False,
    gpu_memory_utilization: UtilizationOption = 0.9,
    reserve_memory: ReserveOption = None,
    block_size: BlockSizeOption = 16,
    seed: Annotated[int, model_option(help="Seed for dummy weights.", min=0)] = 0,
    threads: ThreadsOption = None,
    tensor_parallel_size: TensorParallelOption = 1,
    nnodes: Annotated[int, gpus_option(help="Number of machines that share the model (docs/parallel.md).", min=1)] = 1,
    node_rank: Annotated[int, gpus_option(help="Number of this machine. 0 serves, the others compute.", min=0)] = 0,
    master_addr: Annotated[str, gpus_option(help="Address at which the other machines reach machine 0.")] = "",
    master_port: Annotated[
        int, gpus_option(help="Port at which machine 0 waits for the others.", min=1, max=65535)
    ] = 29501,
    rank_secret_file: Annotated[Path | None, gpus_option(help="File with a secret that all machines share.")] = None,
    kernel_cache: KernelCacheOption = None,
    speculative_config: SpeculativeOption = None,
    drain_timeout: Annotated[
        float,
        network_option(
            help="Seconds from SIGTERM to the end. Requests still open 5 seconds before it are aborted.", min=0
        ),
    ] = 30.0,
    restart_engine: Annotated[
        int,
        network_option(
            help="How many times to start the engine again if it ends. New requests wait while it loads. Default: the "
            "server exits with it, for a service manager to restart.",
            min=0,
            show_default=False,
        ),
    ] = 0,
    metrics_prefix: Annotated[str, network_option(help="Prefix of every metric. Use vllm for vLLM's dashboards.")] = (
        "microscale"
    ),
    max_body_bytes: Annotated[int, limit_option(help="Maximum bytes of a request.")] = DEFAULTS.max_body_bytes,
    max_header_bytes: Annotated[
        int, limit_option(help="Maximum bytes of a request's headers.")
    ] = DEFAULTS.max_header_bytes,
    max_n: Annotated[int, limit_option(help="Maximum of a request's n.")] = DEFAULTS.max_n,
    max_choices: Annotated[
        int, limit_option(help="Maximum number of answers per request: prompts times n.")
    ] = DEFAULTS.max_choices,
    max_stop_strings: Annotated[int, limit_option(help="Maximum number of stop strings.")] = DEFAULTS.max_stop_strings,
    max_logit_bias: Annotated[
        int, limit_option(help="Maximum number of tokens in logit_bias.")
    ] = DEFAULTS.max_logit_bias,
    max_messages: Annotated[int, limit_option(help="Maximum number of messages in a chat.")] = DEFAULTS.max_messages,
    max_tools: Annotated[int, limit_option(help="Maximum number of tools.")] = DEFAULTS.max_tools,
    max_schema_depth: Annotated[int, limit_option(help="Maximum depth of a JSON schema.")] = DEFAULTS.max_schema_depth,
    max_schema_bytes: Annotated[int, limit_option(help="Maximum bytes of a JSON schema.")] = DEFAULTS.max_schema_bytes,
    max_stored_responses: Annotated[
        int, limit_option(help="Maximum number of stored responses.")
    ] = DEFAULTS.max_stored_responses,
    max_stored_bytes: Annotated[
        int, limit_option(help="Maximum bytes of all stored responses.")
    ] = DEFAULTS.max_stored_bytes,
    compile_timeout_s: Annotated[
        float, limit_option(help="Seconds that a schema or grammar may take to compile.")
    ] = DEFAULTS.compile_timeout_s,
    read_timeout_s: Annotated[
        float, limit_option(help="Seconds that a request may take to arrive.")
    ] = DEFAULTS.read_timeout_s,
    write_timeout_s: Annotated[
        float, limit_option(help="Seconds without reading after which a client is disconnected.")
    ] = DEFAULTS.write_timeout_s,
    max_unread_tokens: Annotated[
        int, limit_option(help="Maximum number of tokens that a client has not read yet.")
    ] = DEFAULTS.max_unread_tokens,
    max_requests_per_client: Annotated[
        int | None,
        limit_option(
            help="Maximum number of requests that one API key, or without keys one address, may have open. Further "
            "requests get HTTP 429. Default: no limit."
        ),
    ] = DEFAULTS.max_requests_per_client,
) -> None:
    """Serve a model over OpenAI's and Anthropic's APIs. Without a MODEL, serve the small embedded model."""
    given = locals()  # options have the names of the limits, which a test checks
    limits = RequestLimits(**{name: given[name] for name in RequestLimits.__dataclass_fields__})
    env = settings.load()
    launched = settings.torchrun()
    if launched is None:
        nodes = nodes_of(nnodes, node_rank, master_addr, master_port, rank_secret_file)
        ranks = RankLayout(tensor_parallel_size, nodes, node_rank)
    else:
        ranks = under_torchrun(launched, rank_secret_file)
    if ranks.nodes is not None and ranks.node_rank:
        sys.exit(run_node(model, ranks, ranks.nodes, device))
    config = EngineConfig(
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
        hf_overrides=parse_overrides(hf_overrides),
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_queue=max_queue,
        prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        gpu_memory_utilization=gpu_memory_utilization,
        reserve_memory=reserve_in_bytes(reserve_memory),
        block_size=block_size,
        offline=env.offline,
        seed=seed,
        threads=threads,
        tensor_parallel_size=ranks.world,
        nodes=ranks.nodes,
        kernel_cache=None if kernel_cache is None else str(kernel_cache.absolute()),
        speculative=parse_config(speculative_config),
        drain_s=drain_timeout,
    )
    show_log()
    keys = read_keys(api_key or [], api_key_file)
    origins = read_origins(allowed_origin or [], has_keys=bool(keys))
    if not keys and host not in LOOPBACK:
        err.print(
            f"[yellow]Anyone who can reach {escape(host)} can use this server:[/] set --api-key-file to prevent that."
        )
    is_dummy = load_format is LoadFormat.DUMMY
    names = tuple(served_model_name or [embedded.SERVED_NAME if model == embedded.NAME else model])
    with engine_in_terminal(f"Loading {names[0]}", EngineProcess()) as (launch, end_loading):
        # The engine's process imports torch meanwhile.
        from microscale.server.model_files import find_tokenizer, read_sampling_defaults

        def on_ready(ready: Ready, address: str) -> None:
            end_loading()
            announce(ready, address, names[0], warning(model, is_dummy=is_dummy), has_keys=bool(keys))

        options = ServeOptions(
            engine=config,
            tokenizer=find_tokenizer(tokenizer or model, chat_template, offline=env.offline, is_dummy=is_dummy),
            chat_template=chat_template,
            sampling=read_sampling_defaults(generation_config, model, offline=env.offline, is_dummy=is_dummy),
            names=names,
            host=host,
            port=port,
            keys=keys,
            allowed_hosts=tuple(allowed_host or ()),
            allowed_origins=origins,
            strict_requests=strict_requests,
            limits=limits,
            metrics_prefix=metrics_prefix,
            drain_s=drain_timeout,
            restart_engine=restart_engine,
            strict_eos=not is_dummy,
            launch=launch,
            on_ready=on_ready,
        )
        sys.exit(run_server(options))


@dataclass(frozen=True)
class RankLayout:
    """How many ranks share the model, on which machines, and on which of them this process runs."""

    world: int
    nodes: Nodes | None
    node_rank: int
    local_rank: int | None = None
    """Number of the GPU, under torchrun."""


def nodes_of(nnodes: int, node_rank: int, master_addr: str, master_port: int, secret: Path | None) -> Nodes | None:
    """The machines if there are several. Wrong options are refused before anything starts."""
    if nnodes == 1:
        if node_rank or master_addr or secret is not None:
            raise BadSetting("--node-rank, --master-addr and --rank-secret-file need --nnodes 2 or more.")
        return None
    if node_rank >= nnodes:
        raise BadSetting(f"--node-rank {node_rank} is not below --nnodes {nnodes}.")
    if not master_addr:
        raise BadSetting("--nnodes needs --master-addr, the address at which the other machines reach machine 0.")
    if secret is None:
        raise BadSetting(
            "--nnodes needs --rank-secret-file, a file with the same secret on all machines; "
            "`openssl rand -hex 32` makes one."
        )
    read_secret(secret)
    return Nodes(nnodes, master_addr, master_port, str(secret.absolute()))


def under_torchrun(launched: settings.Torchrun, secret: Path | None) -> RankLayout:
    """Each process of torchrun is one rank, as if it had a machine of its own. The port is the one after torchrun's."""
    if launched.world == 1:
        return RankLayout(1, None, 0)
    nodes = nodes_of(launched.world, launched.rank, launched.address, launched.port + 1, secret)
    return RankLayout(launched.world, nodes, launched.rank, launched.local_rank)


def run_node(model: str, ranks: RankLayout, nodes: Nodes, device: str) -> int:
    """Compute on a machine other than machine 0. Only the ranks import torch."""
    from microscale.engine.ranks import processes

    if ranks.world % nodes.count:
        raise BadSetting(
            f"--tensor-parallel-size {ranks.world} ranks cannot be spread evenly over --nnodes {nodes.count}."
        )
    gpu = f"cuda:{ranks.local_rank}" if ranks.local_rank is not None and device in ("auto", "cuda") else None
    return processes.run_node(model, ranks.world, nodes, ranks.node_rank, gpu)


def run_server(options: ServeOptions) -> int:
    """Serve until the end. The imports take a second, in which the engine process imports torch."""
    import asyncio

    import uvloop

    from microscale.server.run import serve as run

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(options))


def warning(model: str, *, is_dummy: bool) -> str:
    """A warning about a model that cannot give useful answers."""
    if is_dummy:
        return "[yellow]The weights are random:[/] the answers mean nothing."
    if model == embedded.NAME:
        return f"[yellow]This is {embedded.ABOUT}.[/] A real model: microscale serve openai/gpt-oss-20b"
    return ""


def announce(ready: Ready, address: str, name: str, warned: str, *, has_keys: bool) -> None:
    """Print where the server is, and a command to try. The engine has logged the plan."""
    # No client can connect to the address that stands for all of them.
    here = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    everywhere = "" if here == address else " and at this machine's other addresses"
    key = "-H 'Authorization: Bearer YOUR_KEY' " if has_keys else ""
    if warned:
        print_wrapped(err, warned)
    # Room for reasoning: an answer that is cut off within it is empty.
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is 12 + 30?"}}], "max_tokens": 256}}'
    curl = f"curl {here}/v1/chat/completions {key}-H 'Content-Type: application/json' -d {shlex.quote(body)}"
    err.print(f"Serving [bold]{escape(name)}[/] with up to {ready.max_model_len} tokens at [bold]{here}[/]{everywhere}")
    chat = f"{program()} chat" + f" --url {here}" * (here != USUAL_URL) + " --api-key YOUR_KEY" * has_keys
    err.print(f"Try it in a browser there, with `{escape(chat)}`, or:\n  {escape(curl)}", soft_wrap=True)


def program() -> str:
    """How to call Microscale: as the user did, unless it is on the PATH. In a checkout that is .venv/bin/microscale."""
    typed = sys.argv[0]
    return shlex.quote(typed) if Path(typed).name == "microscale" and not shutil.which("microscale") else "microscale"
