"""The arguments of a Ray Serve application, read strictly: options of ``microscale serve``, and those for replicas.

Imports nothing of Ray, so that a mistake is reported before a cluster is contacted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from microscale import settings
from microscale.engine.config import EngineConfig
from microscale.engine.limits import LEAST_SEQUENCES
from microscale.engine.speculation.config import SpeculativeConfig, parse_config
from microscale.errors import BadSetting
from microscale.integrations.prefix_routing import KIB_PER_REQUEST, MAX_ENTRIES
from microscale.models import embedded
from microscale.models.config import LoadFormat
from microscale.server.model_files import AUTO, find_tokenizer, read_sampling_defaults
from microscale.server.options import RequestLimits, ServeOptions, read_keys, read_origins

T = TypeVar("T")
Count = Annotated[int, Meta(ge=1, le=10_000)]
OTHER_NAMES = {"enable_prefix_caching": "prefix_caching"}
"""Option of ``microscale serve`` → the engine's name for it."""
TOKENIZER = {"vocabulary", "control_tokens", "split_pattern"}
LISTS = {"served_model_name", "allowed_host", "allowed_origin", "layer_format"}
"""Arguments with several values."""
RANKS = {"nodes", "shard", "sharing"}  # a replica has the ranks of one machine
NOT_GIVEN = {"drain_s", "offline", "prefix_caching", "speculative"} | TOKENIZER | RANKS
"""Fields of ``EngineConfig`` that are derived and not arguments."""


class Deployed(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments for the server and for Ray; the others are the engine's options and the request limits."""

    served_model_name: tuple[str, ...] = ()
    api_key_file: str | None = None
    """Read on every machine with a replica. Keys themselves are not accepted, since Ray shows arguments to everyone."""
    allow_without_key: bool = False
    """Answer other machines although there are no keys."""
    allowed_host: tuple[str, ...] = ()
    allowed_origin: tuple[str, ...] = ()
    strict_requests: bool = False
    tokenizer: str | None = None
    chat_template: str | None = None
    """A file on every machine with a replica."""
    generation_config: str = AUTO
    metrics_prefix: str = "microscale"
    drain_timeout: Annotated[float, Meta(ge=0.0)] = 30.0
    min_replicas: Count = 1
    max_replicas: Count | None = None
    """Default: ``min_replicas``, which turns autoscaling off."""
    target_ongoing_requests: Annotated[float, Meta(gt=0.0)] | None = None
    """Open requests per replica that autoscaling aims at. Default: 3/4 of ``max_num_seqs``."""
    max_ongoing_requests: Count | None = None
    """Maximum per replica; further requests wait. Default: twice ``max_num_seqs``."""
    front_replicas: Count = 1
    """Processes that read requests and route them."""
    messages_per_front: Annotated[float, Meta(gt=0.0)] = 500.0
    """Per second. Replicas batch tokens to stay below it: a message takes 1.3 ms of a front's core."""
    num_cpus: Annotated[float, Meta(ge=0.0)] = 1.0
    num_gpus: Annotated[float, Meta(ge=0.0)] | None = None
    """Per replica. Default: one for each rank, none on a CPU."""
    health_check_period_s: Annotated[float, Meta(gt=0.0)] = 1.0
    """A replica is replaced after three failures in a row."""
    routing: Literal["prefix", "load"] = "prefix"
    """By shared prefix and load, or as Ray does by default."""
    routing_table_entries: Annotated[int, Meta(ge=1)] = MAX_ENTRIES
    routing_kib_per_request: Annotated[float, Meta(gt=0.0)] = KIB_PER_REQUEST


@dataclass(frozen=True)
class RayOptions:
    """The arguments as plain data, which is sent to the replicas."""

    deployed: Deployed
    engine: EngineConfig
    limits: RequestLimits

    @property
    def max_replicas(self) -> int:
        return self.deployed.max_replicas or self.deployed.min_replicas

    @property
    def num_gpus(self) -> float:
        needed = float(self.engine.tensor_parallel_size) if self.engine.device != "cpu" else 0.0
        return needed if self.deployed.num_gpus is None else self.deployed.num_gpus

    @property
    def max_num_seqs(self) -> int:
        """Ray must know it before there is an engine, which would choose by its card's memory."""
        return self.engine.max_num_seqs or LEAST_SEQUENCES

    @property
    def max_ongoing_requests(self) -> int:
        return self.deployed.max_ongoing_requests or 2 * self.max_num_seqs

    @property
    def target_ongoing_requests(self) -> float:
        return self.deployed.target_ongoing_requests or 0.75 * self.max_num_seqs

    @property
    def messages_per_s(self) -> float:
        """Messages that one replica may send while all are busy."""
        return self.deployed.messages_per_front * self.deployed.front_replicas / self.max_replicas

    @property
    def keys(self) -> tuple[bytes, ...]:
        """From the file on this machine."""
        file = self.deployed.api_key_file
        return read_keys([], None if file is None else Path(file))

    def serve_options(self) -> ServeOptions:
        """The options of a server on this machine."""
        keys, given, model = self.keys, self.deployed, self.engine.model
        offline = settings.load().offline
        template = None if given.chat_template is None else Path(given.chat_template)
        is_dummy = LoadFormat(self.engine.load_format) is LoadFormat.DUMMY
        return ServeOptions(
            engine=msgspec.structs.replace(
                self.engine, max_num_seqs=self.max_num_seqs, offline=offline, drain_s=given.drain_timeout
            ),
            tokenizer=find_tokenizer(given.tokenizer or model, template, offline=offline, is_dummy=is_dummy),
            chat_template=template,
            sampling=read_sampling_defaults(given.generation_config, model, offline=offline, is_dummy=is_dummy),
            names=given.served_model_name or (embedded.SERVED_NAME if model == embedded.NAME else model,),
            keys=keys,
            allowed_hosts=given.allowed_host,
            allowed_origins=read_origins(list(given.allowed_origin), has_keys=bool(keys)),
            strict_requests=given.strict_requests,
            limits=self.limits,
            metrics_prefix=given.metrics_prefix,
            drain_s=given.drain_timeout,
            strict_eos=not is_dummy,
        )


def read_options(arguments: Mapping[str, Any]) -> RayOptions:
    """Read the arguments that Ray passes to an app builder. Unknown or wrong ones are refused by name."""
    engine_names = set(EngineConfig.__struct_fields__) - NOT_GIVEN
    limit_names = {field.name for field in fields(RequestLimits)}
    own_names = set(Deployed.__struct_fields__)
    known = own_names | engine_names | limit_names | OTHER_NAMES.keys() | {"speculative_config"}
    if unknown := arguments.keys() - known:
        names = ", ".join(sorted(map(str, unknown)))
        raise BadSetting(f"Unknown argument {names}. An argument is an option of `microscale serve` with underscores.")
    engine = {OTHER_NAMES.get(n, n): v for n, v in arguments.items() if n in engine_names | OTHER_NAMES.keys()}
    options = RayOptions(
        _converted({n: v for n, v in arguments.items() if n in own_names}, Deployed),
        _converted({"model": embedded.NAME, **engine, "speculative": _drafts(arguments)}, EngineConfig),
        _converted({n: v for n, v in arguments.items() if n in limit_names}, RequestLimits),
    )
    if options.max_replicas < options.deployed.min_replicas:
        raise BadSetting("max_replicas is below min_replicas.")
    return options


def _drafts(arguments: Mapping[str, Any]) -> SpeculativeConfig | None:
    text = arguments.get("speculative_config")
    if text is not None and not isinstance(text, str):
        raise BadSetting("An argument of the application is wrong: speculative_config takes JSON, as a string.")
    return parse_config(text)


def _converted(given: Mapping[str, Any], kind: type[T]) -> T:
    try:
        # YAML files often have one name where several are allowed.
        return msgspec.convert({n: [v] if n in LISTS and isinstance(v, str) else v for n, v in given.items()}, kind)
    except msgspec.ValidationError as error:
        raise BadSetting(f"An argument of the application is wrong: {error}.") from None
