"""Two processes on one GPU that add up through each other's memory, in captured graphs.

Each GPU process has its turn of some milliseconds, so a sum takes as long as both need to come by: nothing here is
timed. Run with ``-s`` to see what the ranks say.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

pytest.importorskip("msgspec", reason="ranks talk through msgspec")

from microscale.backends.peer_ranks import PeerRanks
from microscale.engine.config import EngineConfig
from microscale.engine.loading.drafting import load_head
from microscale.engine.loading.load import load
from microscale.engine.loading.prepare import prepare, prepare_team
from microscale.engine.ranks.team import RankTeam
from microscale.engine.sampling_params import SamplingParams
from microscale.engine.speculation.config import SpeculativeConfig
from microscale.models.families import AnyModel, write_random_checkpoint
from support.child import as_process
from support.demo_prompts import demo_prompts
from support.forward import all_logits
from support.greedy import near_tie
from support.ranks import Run, Said, check_same, ranks, run_engine

pytestmark = [pytest.mark.odd_shapes, pytest.mark.own("starts processes of its own")]
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
SHAPE = {"num_hidden_layers": 4, "num_local_experts": 4, "vocab_size": 4096}
"""Every token goes to all experts: a rounding sends none to another."""
PATIENT_S = 300.0
PROMPTS = [[7, 8, 9, 10, 11, 300, 400, 500], list(range(100, 133)), [5]]
NEW = 24
LOUDER = 64.0


@pytest.fixture(autouse=True)
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERLAPPING, "1")
    monkeypatch.setenv("MICROSCALE_PEER_SUMS", "1")  # what cannot be mapped is an error, with its reason


@pytest.mark.parametrize("world", [2])
def test_sums_in_captured_graphs_are_those_in_the_order_of_ranks(world: int, tmp_path: Path) -> None:
    """1,000 replays of eight sums each, with other numbers every time."""
    store = tmp_path / "store"
    processes = [
        subprocess.Popen(
            as_process("support.peer_rank", str(rank), str(world), str(store)),
            stdout=subprocess.PIPE,
            stderr=(tmp_path / f"rank{rank}").open("w"),
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [process.communicate(timeout=PATIENT_S)[0] for process in processes]
    finally:
        for rank, process in enumerate(processes):
            process.kill()
            process.wait()
            print((tmp_path / f"rank{rank}").read_text())
    assert [process.returncode for process in processes] == [0] * world
    for rank, line in enumerate(told):
        print(line)
        answer = json.loads(line)
        assert answer["rank"] == rank
        assert answer["wrong"] == [0, 0, 0]
        # Once as it is, and once in each replay: sum, and sum with norm, of each shape that has the row.
        assert answer["uses"][0] == 8 * (1 + answer["replays"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("gpt-oss")
    write_random_checkpoint("gpt-oss-20b", found, SHAPE)
    # With random weights every token would be followed by the same one; these differ, and by more than roundings.
    tensors = load_file(found / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] *= LOUDER
    save_file(tensors, found / "model.safetensors")
    return found


def options(folder: Path, **others: object) -> EngineConfig:
    return EngineConfig(str(folder), device="cuda:0", **others)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def near(folder: Path) -> float:
    """Log-probability between the two tokens where outputs may part by a rounding to bf16."""
    found = []
    for dtype in ("float32", "bfloat16"):
        model: AnyModel = load(prepare(options(folder, dtype=dtype, backend="reference")))
        found.append(torch.cat(all_logits(model, PROMPTS, 512)))
    return near_tie(found[1], found[0])


def asked() -> Run:
    return Run(PROMPTS, [SamplingParams(NEW, ignore_eos=True, logprobs=5)] * len(PROMPTS), step_tokens=48)


def parted(one: list[Said], other: list[Said]) -> list[tuple[int, int, float]]:
    """Where answers part: request, place, and how much likelier the first one's token was there than the other's."""
    found = []
    for request, (mine, theirs) in enumerate(zip(one, other, strict=True)):
        assert len(mine.tokens) == len(theirs.tokens) == NEW
        for at, (token, another) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)):
            if token != another:
                found.append((request, at, mine.logprobs[at] - dict(mine.top[at]).get(another, -torch.inf)))
                break
    return found


def test_two_ranks_of_gpt_oss_give_the_tokens_of_one(
    folder: Path, near: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, _ = run_engine(load(prepare(options(folder))), asked())
    two: dict[str, list[Said]] = {}
    for name, through_peers in (("peers, captured", "1"), ("gloo, no graphs", "0")):
        monkeypatch.setenv("MICROSCALE_PEER_SUMS", through_peers)
        with ranks(options(folder, tensor_parallel_size=2)) as (model, team):
            assert isinstance(model.ops.ranks, PeerRanks) == (through_peers == "1")
            assert team.capturable == (through_peers == "1")
            two[name], engine = run_engine(model, asked(), team)
            graphs = engine._runner._runner._graphs  # type: ignore[attr-defined]
            captured = [key for key in graphs._graphs if hasattr(key, "rows")]
        print(f"{name}: {len(captured)} graphs of decoding; near is {near:.4f}")
        assert bool(captured) == (through_peers == "1")
        ways = parted(wanted, two[name])
        print(f"{name} against one rank: parts at {ways}")
        assert all(gap <= near for _, _, gap in ways)
    # Both add up the same two numbers in bf16, and then round once: the same bits, in a graph or not.
    fast, slow = two["peers, captured"], two["gloo, no graphs"]
    apart = max(
        abs(p - q) for a, b in zip(fast, slow, strict=True) for p, q in zip(a.logprobs, b.logprobs, strict=True)
    )
    print(f"peers against gloo: parts at {parted(fast, slow)}, log-probabilities {apart:.2e} apart")
    assert [said.tokens for said in fast] == [said.tokens for said in slow]


def test_two_ranks_with_a_draft_head_give_the_tokens_of_one() -> None:
    """The embedded model and its trained head, in float32: what differs is the order of sums alone."""
    drafts = SpeculativeConfig("eagle3", 3)
    one = prepare(EngineConfig("demo", device="cuda:0", dtype="float32", speculative=drafts))
    run = Run(
        demo_prompts(2), [SamplingParams(12, ignore_eos=True, logprobs=5)] * 2, step_tokens=48, speculative=drafts
    )
    model = load(one)
    assert one.head is not None
    wanted, alone = run_engine(model, run, head=load_head(one.head, model))
    team = RankTeam(replace(one.options, tensor_parallel_size=2))
    two = prepare_team(team)
    try:
        shared = load(two)
        assert isinstance(shared.ops.ranks, PeerRanks)
        assert two.head is not None
        found, engine = run_engine(shared, run, team, load_head(two.head, shared))
    finally:
        team.close()
    accepted = [each.stats().num_accepted_tokens for each in (alone, engine)]
    print(f"accepted drafts of one rank and of two: {accepted}")
    check_same("a draft head on two ranks", wanted, found)
    assert min(accepted) > 0
