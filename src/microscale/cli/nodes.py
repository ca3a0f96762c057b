"""The options of ``serve`` for several machines."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from microscale.errors import BadSetting
from microscale.parallel.handshake import Nodes, read_secret
from microscale.settings import Torchrun

NnodesOption = Annotated[int, typer.Option(help="Machines that share the model: docs/parallel.md.", min=1)]
NodeRankOption = Annotated[int, typer.Option(help="The number of this machine; 0 serves, the others compute.", min=0)]
MasterAddrOption = Annotated[str, typer.Option(help="The address at which the other machines reach machine 0.")]
MasterPortOption = Annotated[int, typer.Option(help="The port at which machine 0 waits for them.", min=1, max=65535)]
RankSecretOption = Annotated[Path | None, typer.Option(help="A file with a secret that all machines share.")]
MASTER_PORT = 29501


def nodes_of(nnodes: int, node_rank: int, master_addr: str, master_port: int, secret: Path | None) -> Nodes | None:
    """The machines, if there are several; what is wrong with them is said before anything starts."""
    if nnodes == 1:
        if node_rank or master_addr or secret is not None:
            raise BadSetting("--node-rank, --master-addr and --rank-secret-file are for --nnodes 2 and more.")
        return None
    if node_rank >= nnodes:
        raise BadSetting(f"--node-rank {node_rank} is not below --nnodes {nnodes}.")
    if not master_addr:
        raise BadSetting("--nnodes needs --master-addr: the address of machine 0, by which the others reach it.")
    if secret is None:
        raise BadSetting(
            "--nnodes needs --rank-secret-file: a file with a secret that all machines have, as from "
            "`openssl rand -hex 32`."
        )
    read_secret(secret)
    return Nodes(nnodes, master_addr, master_port, str(secret.absolute()))


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are, on which machines, and which of these this process is for."""

    world: int
    nodes: Nodes | None
    node_rank: int
    local_rank: int | None = None
    """The number of the GPU, under torchrun."""


def under_torchrun(launched: Torchrun, secret: Path | None) -> Ranks:
    """Each process of torchrun is one rank, as if it had a machine of its own. The port is the one after torchrun's."""
    if launched.world == 1:
        return Ranks(1, None, 0)
    nodes = nodes_of(launched.world, launched.rank, launched.address, launched.port + 1, secret)
    return Ranks(launched.world, nodes, launched.rank, launched.local_rank)


def run_node(model: str, ranks: Ranks, nodes: Nodes, device: str) -> int:
    """Compute on a machine that is not the first. Imports torch in the ranks alone."""
    world, node_rank = ranks.world, ranks.node_rank
    if world % nodes.count:
        raise BadSetting(f"--tensor-parallel-size {world} ranks cannot be spread evenly over --nnodes {nodes.count}.")
    gpu = f"cuda:{ranks.local_rank}" if ranks.local_rank is not None and device in ("auto", "cuda") else None
    module = importlib.import_module("microscale.engine.ranks.processes")
    status: int = module.run_node(model, world, nodes, node_rank, gpu)
    return status
