"""Everything that is settled before a model is loaded, each thing once.

options ──► device, open weights ──► setup ──► outline ──► plan ──► memory       prepare: reads headers, refuses
Prepared ──► model (``load``) ──► engine (``build``)                             load: reads the weights
"""

from __future__ import annotations

import hashlib
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import triton

from microscale import hardware
from microscale.engine.config import EngineConfig
from microscale.engine.limits import LEAST_SEQUENCES
from microscale.engine.loading.cpu_speed import SLOW, decode_speed
from microscale.engine.loading.drafting import PreparedHead, expect_head, open_head, prepare_head
from microscale.engine.loading.fit import check_fits, plan_and_size
from microscale.engine.loading.memory import LEAST_CONTEXT, Memory, Workload, memory_for, with_room
from microscale.engine.loading.precisions import settle_precision
from microscale.engine.predictions import SHORT_CONTEXT, Phase, predict
from microscale.engine.speculation.config import MTP
from microscale.errors import BadSetting, Unsupported
from microscale.hardware import Gpu
from microscale.models import hub
from microscale.models.checkpoint import FromCheckpoint
from microscale.models.config import OWN_FORMATS, HeadFormats, LayerKind, LoadFormat
from microscale.models.draft_heads.weights import HeadWeights
from microscale.models.families import ModelConfig, ModelWeights, find_config, open_weights
from microscale.models.outline import Outline, outline, shard_name
from microscale.parallel.sharding import WHOLE, Shard
from microscale.planning.decision import Plan
from microscale.planning.ops import Activations, Preference
from microscale.planning.plan import Setup
from microscale.planning.precision import Precision, make_precision
from microscale.planning.threads import check_threads

if TYPE_CHECKING:
    from microscale.engine.ranks.leader import RankTeam

log = logging.getLogger(__name__)
DTYPES = {"float32": Activations.FLOAT32, "bfloat16": Activations.BF16}


@dataclass(frozen=True)
class Prepared:
    """A model that can be loaded: it was found, checked, planned, and it fits."""

    options: EngineConfig
    device: torch.device
    weights: ModelWeights
    """Open and checked against their config; nothing is read of them yet."""
    setup: Setup
    """GPU, type of the activations, what the user prefers, precision."""
    outline: Outline
    """What the model uses."""
    plan: Plan
    """Which kernel runs each of that."""
    memory: Memory
    """What it takes, and how many pages and sequences fit next to it. Computed before the load: afterwards the weights
    would count twice, as needed and as no longer free."""
    head: PreparedHead | None = None
    """The draft head, if drafts come from one."""
    team: RankTeam | None = None
    """The other ranks, where there are some and this is the first."""

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def page_size(self) -> int:
        return self.memory.workload.page_size

    def pages(self) -> dict[LayerKind, int]:
        """How many KV pages each kind of layer gets; as many on every rank."""
        return self.memory.pages() if self.team is None else self.team.pages()

    def fingerprint(self) -> dict[str, str]:
        """What all ranks must have alike."""
        head, drafts = self.head, self.options.speculative
        if head is None or drafts is None:
            return fingerprint(self.weights, self.setup, self.options.seed)
        return fingerprint(self.weights, self.setup, self.options.seed, head.weights, drafts.head_formats)

    def close(self) -> None:
        """End the other ranks, if there are any."""
        if self.team is not None:
            self.team.close()


def prepare(
    options: EngineConfig, check: Callable[[ModelConfig], None] = lambda config: None, draft_tokens: int = 0
) -> Prepared:
    """Find, check and plan a model, or raise why it cannot run here.

    ``check`` is the caller's: it may refuse the model by its config, before anything is planned. ``draft_tokens``: of a
    sequence in one step, for a benchmark that makes drafts up; else ``options.speculative`` decides.
    """
    check_options(options)
    if options.tensor_parallel_size == 1 or not options.shard.is_whole:
        return _prepare(options, check, draft_tokens)
    # Imported here, because it imports this module.
    leader = importlib.import_module("microscale.engine.ranks.leader")
    return prepare_team(leader.RankTeam(options), check)


def prepare_team(team: RankTeam, check: Callable[[ModelConfig], None] = lambda config: None) -> Prepared:
    """The same for rank 0 of a team, whose other ranks prepare meanwhile. It is closed if that fails."""
    try:
        prepared = replace(_prepare(team.options, check), team=team)
        team.agree(prepared.memory.pages(), prepared.fingerprint(), prepared.memory.by_kind())
    except BaseException:
        team.close()
        raise
    return prepared


def _prepare(options: EngineConfig, check: Callable[[ModelConfig], None], draft_tokens: int = 0) -> Prepared:
    device = choose_device(options.device)
    setup = Setup(
        gpu_of(device), choose_activations(options.dtype, device), preference_of(options), precision_of(options)
    )
    # Whatever can be refused is refused before weights are downloaded.
    config = find_config(options.model, options.load_format, options.hf_overrides, options.offline)
    config, drafts = config.sharded(options.shard), options.speculative
    draft_tokens = draft_tokens if drafts is None else drafts.num_speculative_tokens
    workload = replace(workload_of(options), draft_tokens=draft_tokens)
    check(config)
    available = hardware.available_memory(setup.gpu, device.index or 0)
    if options.sharing > 1:
        workload = replace(workload, utilization=workload.utilization / options.sharing)
        available //= options.sharing
    name = shard_name(options.model, options.shard)
    shape = outline(name, config, setup.activations, workload.page_size, config.max_context)
    setup, chosen_because = settle_precision(shape, setup, workload, available)
    if chosen_because is not None:
        log.info(chosen_because)
    if setup.precision.nvfp4_activations and setup.precision.weights_only:
        log.info(
            "The checkpoint's NVFP4 weights are published for wider activations, which it keeps; --moe-activations "
            "nvfp4 gives its experts NVFP4 ones."
        )
    shape.check_drafts(workload.draft_tokens)
    head = None
    if drafts is not None and drafts.is_head:
        expected = expect_head(drafts, options.model, config, offline=options.offline, load_format=options.load_format)
        head = prepare_head(expected, setup, workload.page_size, drafts.head_formats)
        workload = replace(workload, head=head.need)
    plan, memory = plan_and_size(shape, setup, workload, available)
    if options.max_num_seqs is None and options.tensor_parallel_size == 1:  # ranks must not find different numbers
        memory = with_room(memory, partial(memory_for, shape, plan, setup, available=available))
    check_fits(shape, setup, memory)
    if setup.gpu.is_cpu and options.shard.is_first:
        _check_speed(options, shape, plan, setup, memory)
    if options.load_format != LoadFormat.DUMMY and options.shard.is_first:
        _announce_download(options, shape, plan, setup, workload.step_tokens)
    weights = open_weights(
        options.model,
        load_format=options.load_format,
        overrides=options.hf_overrides,
        offline=options.offline,
        seed=options.seed,
        shard=options.shard,
    )
    if head is not None and drafts is not None and drafts.method == MTP:
        opened = open_head(
            drafts,
            options.model,
            config,
            offline=options.offline,
            load_format=options.load_format,
            overrides=options.hf_overrides,
            seed=options.seed,
        )
        head = prepare_head(opened, setup, workload.page_size, drafts.head_formats)
    return Prepared(options, device, weights, setup, shape, plan, memory, head)


def _check_speed(options: EngineConfig, shape: Outline, plan: Plan, setup: Setup, memory: Memory) -> None:
    """Say how slow a large model is on a CPU. Below half a token per second, the user must agree."""
    tok_s = decode_speed(shape, plan, setup, memory)
    if tok_s is None:
        return
    speed = f"{options.model} makes at most {tok_s:.2g} tokens per second on this CPU"
    if tok_s < SLOW and not options.allow_slow:
        raise Unsupported(
            f"{speed}: its weights are read for every token, and Microscale's fast kernels need an NVIDIA GPU. Add "
            "--yes to run it nevertheless; `microscale serve demo` tries the server with a small model."
        )
    log.info("%s.", speed)


def _announce_download(options: EngineConfig, shape: Outline, plan: Plan, setup: Setup, step_tokens: int) -> None:
    """Say what will be downloaded and how fast it will run, or refuse it if the disk is too small."""
    missing = hub.missing(options.model, offline=options.offline)
    if missing is None:
        return
    missing.check_disk(options.model)
    message = f"Downloading {options.model}: {missing.bytes / 1e9:.3g} GB in {missing.files} files to {missing.cache}."
    if not setup.gpu.is_cpu:  # a CPU's speed was reported before
        point = predict(shape, plan, setup, Phase.DECODE, 1, min(SHORT_CONTEXT, shape.max_context), step_tokens)
        message += f" Predicted on {setup.gpu.name}: {point.tok_s:.3g} tokens per second for one sequence."
    log.info("%s", message)


# ---- what the options mean -------------------------------------------------------------------------------------------


def check_options(options: EngineConfig) -> None:
    """Refuse what is wrong for every model, before the model is looked for."""
    workload_of(options).check_page_size()
    check_threads(options.threads)
    preference_of(options).check()
    Shard(0, options.tensor_parallel_size)
    if options.nodes is not None and options.tensor_parallel_size % options.nodes.count:
        raise BadSetting(
            f"--tensor-parallel-size {options.tensor_parallel_size} ranks cannot be spread evenly over --nnodes "
            f"{options.nodes.count}."
        )


def workload_of(options: EngineConfig) -> Workload:
    """What must fit in memory with the weights, but for what drafts and ranks add."""
    return Workload(
        context=options.max_model_len,
        sequences=options.max_num_seqs or LEAST_SEQUENCES,
        promised=LEAST_CONTEXT,
        step_tokens=options.max_num_batched_tokens,
        page_size=options.block_size,
        utilization=options.gpu_memory_utilization,
        reserve=options.reserve_memory,
    )


def preference_of(options: EngineConfig) -> Preference:
    return Preference(options.backend, options.moe_backend)


def precision_of(options: EngineConfig) -> Precision:
    return make_precision(options.precision, options.layer_format, options.moe_activations, options.kv_cache_dtype)


def uses_nccl(options: EngineConfig, device: torch.device) -> bool:
    """Whether ranks add up by NCCL, which needs a GPU for each of them, and not by gloo."""
    return device.type == "cuda" and options.sharing == 1


def choose_device(name: str) -> torch.device:
    """The device that ``--device`` means, checked to be there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BadSetting(f"Unknown device {name!r}; use auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise BadSetting(f"Device {name!r} is not supported; use auto, cpu, cuda or cuda:N.")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= count:
        raise BadSetting(f"Device {name!r} is not there: torch sees {count} CUDA GPUs; `microscale doctor` says why.")
    return device


def gpu_of(device: torch.device) -> Gpu:
    """What is known of the card behind a device."""
    return hardware.cpu() if device.type == "cpu" else hardware.detect(device.index or 0)


def choose_activations(dtype: str, device: torch.device) -> Activations:
    """The activations' type that ``--dtype`` means on this device."""
    if dtype == "auto":
        return Activations.BF16 if device.type == "cuda" else Activations.FLOAT32
    if dtype not in DTYPES:
        raise BadSetting(f"Unknown dtype {dtype!r}; use auto, {' or '.join(DTYPES)}.")
    return DTYPES[dtype]


# ---- several ranks ---------------------------------------------------------------------------------------------------


def fingerprint(
    weights: ModelWeights, setup: Setup, seed: int, head: HeadWeights | None = None, formats: HeadFormats = OWN_FORMATS
) -> dict[str, str]:
    """What all ranks must have alike before they load parts of one model: texts that are compared, and shown where they
    differ. ``formats``: of the head."""
    texts = {
        "model": _digest(repr(_without_rank(weights.config))),
        "checkpoint": _checkpoint(weights, seed),
        "precision": str(setup.precision),
        "type of activations": setup.activations.value,
        "torch": str(torch.__version__),
        "Triton": triton.__version__,
    }
    if head is not None:
        texts["draft head"] = f"{_digest(repr(_without_rank(head.config)))}, {_checkpoint(head, 0)}"
        texts["draft head's formats"] = f"all {formats.quantization}, lm_head {formats.lm_head}"
    return texts


def _without_rank(config: Any) -> object:
    """All ranks' parts have the same sizes."""
    return replace(config, shard=WHOLE)


def _checkpoint(weights: ModelWeights | HeadWeights, seed: int) -> str:
    """Names, types, shapes and places of all tensors; not their numbers, which would have to be read twice."""
    if not isinstance(weights, FromCheckpoint):
        return f"random weights of seed {seed}"
    entries = sorted(weights.all_entries, key=lambda entry: entry.name)
    listed = [(e.file.name, e.name, e.dtype, e.shape, e.begin, e.end, e.stamp.size) for e in entries]
    return _digest(repr(listed))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
