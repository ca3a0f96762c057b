"""The arguments of a Ray Serve application: strict, the same as the command line's, plain data. No Ray is needed."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from microscale.cli.serve import serve
from microscale.engine.config import EngineConfig
from microscale.errors import BadSetting
from microscale.integrations.ray_serve_options import NOT_GIVEN, OTHER_NAMES, Deployed, read_options
from microscale.server.options import RequestLimits

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"host", "port", "api_key", "restart_engine", "yes"} | {
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "rank_secret_file",
}
"""Options of ``microscale serve`` that Ray has its own for, that a cluster must not be shown, that answer a
question, or that make one model of several machines."""


def test_every_option_of_the_server_is_an_argument() -> None:
    known = set(Deployed.__struct_fields__) | set(EngineConfig.__struct_fields__) - NOT_GIVEN | OTHER_NAMES.keys()
    known |= {"speculative_config", *RequestLimits.__dataclass_fields__}
    assert set(inspect.signature(serve).parameters) - ELSEWHERE <= known
    for name in ELSEWHERE:
        with pytest.raises(BadSetting, match=f"Unknown argument {name}"):
            read_options({name: "x"})


def test_defaults_are_those_of_the_server() -> None:
    options = read_options({})
    declared = inspect.signature(serve).parameters
    same = set(declared) & (set(EngineConfig.__struct_fields__) - NOT_GIVEN)
    assert len(same) > 15
    for name in same - {"load_format", "hf_overrides", "layer_format"}:
        assert getattr(options.engine, name) == declared[name].default, name
    assert options.deployed.drain_timeout == declared["drain_timeout"].default


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"max_model_length": 5}, "Unknown argument max_model_length"),
        ({"vocabulary": []}, "Unknown argument vocabulary"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"min_replicas": 3, "max_replicas": 2}, "below min_replicas"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"max_n": 0}, "max-n"),
        ({"routing": "hash"}, "routing"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"speculative_config": "{"}, "speculative"),
    ],
)
def test_what_is_wrong_is_refused_by_name(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(BadSetting, match=says):
        read_options(arguments)


def test_derived_values() -> None:
    options = read_options({"max_num_seqs": 32, "min_replicas": 2, "enable_prefix_caching": False})
    assert (options.max_replicas, options.max_ongoing_requests, options.target_ongoing_requests) == (2, 64, 24.0)
    four = read_options({"front_replicas": 2, "min_replicas": 4, "messages_per_front": 300})
    assert four.messages_per_s == 150.0, "two fronts pass on 600 messages a second, for four replicas"
    assert (options.num_gpus, read_options({"device": "cpu"}).num_gpus) == (1.0, 0.0)
    assert read_options({"device": "cpu", "num_gpus": 0.5}).num_gpus == 0.5
    assert read_options({"tensor_parallel_size": 2}).num_gpus == 2.0
    assert not options.engine.prefix_caching
    assert read_options({"served_model_name": "one"}).deployed.served_model_name == ("one",)
    assert pickle.loads(pickle.dumps(options)) == options


def test_keys_are_read_where_a_replica_runs(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    options = read_options({"api_key_file": str(file), "allowed_origin": "*", "device": "cpu"})
    assert b"secret" not in pickle.dumps(options)
    file.write_text("secret\n")
    assert options.keys == (b"secret",)
    made = options.serve_options()
    assert (made.keys, made.allowed_origins, made.names) == ((b"secret",), ("*",), ("microscale-demo",))
    file.write_text("")
    with pytest.raises(BadSetting, match="contains no key"):
        _ = options.keys
    assert not Deployed().allow_without_key


def test_the_page_shows_a_config_that_works_and_names_every_argument() -> None:
    page = (ROOT / "docs" / "parallel.md").read_text()
    shown = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 1
    assert len(shown[0].splitlines()) <= 10
    config = yaml.safe_load(shown[0])
    assert config["http_options"]["host"] == "127.0.0.1"
    (app,) = config["applications"]
    options = read_options(app["args"])
    assert (options.deployed.min_replicas, options.max_replicas) == (1, 4)
    module, _, function = app["import_path"].partition(":")
    tree = ast.parse((ROOT / "src" / (module.replace(".", "/") + ".py")).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    own = set(Deployed.__struct_fields__) - set(inspect.signature(serve).parameters)
    assert {name for name in own if f"`{name}`" not in page} == set()
