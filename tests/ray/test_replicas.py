"""Two replicas of the embedded model behind one address, on a real Ray: faults, streams, routing, draining, keys."""

from __future__ import annotations

import json
import re
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ray import serve
from support.ray_cluster import (
    Client,
    Reply,
    config,
    engine_of,
    free_port,
    is_alive,
    kill,
    logs,
    replica_pids,
    running,
    serve_run,
    wait_for,
)

pytestmark = pytest.mark.timeout(900)
NUM_REQUESTS = 200
AT_ONCE = 24
TOKENS = 24
LONG_TOKENS = 600
"""Of a stream that runs while a quarter of the others come and go: each is computed in steps with a dozen of those."""
MAX_NUM_SEQS = 16
SIZE = {"min_replicas": 2, "max_num_seqs": MAX_NUM_SEQS}
ARGS = {"device": "cpu", "threads": 1, **SIZE, "drain_timeout": 300, "messages_per_front": 1e6}
LONG = {"prompt": "A long answer:", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # Ray makes sockets below it, whose paths must be short.
    folder = tmp_path_factory.mktemp("r")
    with running(folder):
        yield folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Client:
    port = free_port()
    serve_run(folder, config(ARGS, port))
    client = Client(port)
    wait_for("a replica", client.is_ready)
    wait_for("both replicas", lambda: len(replica_pids()) == 2)
    return client


def body(number: int, tokens: int = TOKENS) -> dict[str, Any]:
    usage = {"include_usage": True}
    return {"prompt": f"{number} + {number} =", "max_tokens": tokens, "ignore_eos": True, "stream_options": usage}


def whole(reply: Reply, tokens: int = TOKENS) -> bool:
    return reply.done and not reply.errors and (reply.usage or {}).get("completion_tokens") == tokens


def both_answer(client: Client, gone: str) -> bool:
    """Two replicas take requests, and ``gone`` is none of them."""
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda n: client.stream(body(n, 2)), range(8)))
    assert all(whole(reply, 2) for reply in replies), [r for r in replies if not whole(r, 2)]
    names = {reply.replica for reply in replies}
    return len(names) == 2 and gone not in names


def while_streaming(client: Client, num_requests: int, strike: Callable[[str], None]) -> tuple[list[Reply], str]:
    """Send requests beside a long stream on each replica; after a quarter of them call ``strike`` with one replica.

    All answers, the long ones first, and that replica.
    """
    replies = [Reply() for _ in range(2 + num_requests)]
    with ThreadPoolExecutor(2 + AT_ONCE) as pool:
        # Idle replicas take short prompts by turns until each has one.
        long = replies[:2]
        work = [pool.submit(client.stream, body(0, LONG_TOKENS), long[0])]
        wait_for("the first long stream", lambda: long[0].running)
        work.append(pool.submit(client.stream, body(1, LONG_TOKENS), long[1]))
        wait_for("the second long stream", lambda: long[1].running)
        assert long[0].replica != long[1].replica, "the second of two requests went to the busy replica"
        work += [pool.submit(client.stream, body(n), replies[n]) for n in range(2, 2 + num_requests)]
        wait_for("a quarter of the answers", lambda: sum(reply.done for reply in replies) >= num_requests // 4)
        assert long[0].running
        victim = long[0].replica
        strike(victim)
        for each in work:
            each.result()
    return replies, victim


def report(what: str, replies: list[Reply], back_s: float) -> None:
    first = sorted(reply.first_s for reply in replies if reply.done)
    errors = sum(bool(reply.errors) for reply in replies)
    p50, p99 = statistics.median(first), first[int(0.99 * (len(first) - 1))]
    print(
        f"{what}: {len(first)} whole, {errors} told of an error, first token p50 {p50:.2f} s, p99 {p99:.2f} s, ", end=""
    )
    print(f"replaced {back_s:.1f} s after the last answer")


def check_damage(replies: list[Reply], victim: str) -> None:
    """Streams that had begun on the lost replica, and no others, end with an error that says so."""
    tokens = [LONG_TOKENS] * 2 + [TOKENS] * (len(replies) - 2)
    broken = [reply for reply, count in zip(replies, tokens, strict=True) if not whole(reply, count)]
    assert replies[0] in broken
    assert replies[1] not in broken
    assert all(reply.replica == victim and reply.num_events for reply in broken)
    assert len(broken) <= MAX_NUM_SEQS
    # Told, and not merely cut off.
    assert all(reply.errors and not reply.broken for reply in broken), [reply.broken for reply in broken]
    assert {reply.errors[0]["code"] for reply in broken} == {"engine_died"}


def test_a_replica_is_killed_in_the_middle_of_200_streams(client: Client) -> None:
    wait_for("both replicas", lambda: both_answer(client, gone=""))
    pids = replica_pids()
    replies, victim = while_streaming(client, NUM_REQUESTS, lambda name: kill(pids[name]))
    check_damage(replies, victim)
    back_s = wait_for("the replica's successor", lambda: both_answer(client, victim))
    report("a replica killed", replies, back_s)


def test_an_engine_that_dies_takes_its_streams_and_no_others(client: Client) -> None:
    wait_for("both replicas", lambda: both_answer(client, gone=""))
    pids = replica_pids()
    engines = {name: engine_of(pid) for name, pid in pids.items()}
    replies, victim = while_streaming(client, 60, lambda name: kill(engines[name]))
    check_damage(replies, victim)
    # A process without an engine fails its health checks, and Ray puts another in its place.
    back_s = wait_for("the replica's successor", lambda: both_answer(client, victim))
    wait_for("the end of the old one", lambda: not is_alive(pids[victim]))
    report("an engine killed", replies, back_s)


def test_conversations_stay_where_their_prefix_is(client: Client) -> None:
    wait_for("both replicas", lambda: both_answer(client, gone=""))
    talks = [f"Conversation {n}. " + f"Rule {n}: be brief. " * 80 for n in range(8)]
    homes: dict[int, set[str]] = {n: set() for n in range(8)}
    cached = 0
    for _turn in range(3):
        for n in range(8):
            talks[n] += " Next. "
            reply = client.stream({"prompt": talks[n], "max_tokens": 2, "stream_options": {"include_usage": True}})
            assert reply.done, reply
            homes[n].add(reply.replica)
            assert reply.usage is not None
            cached += reply.usage["prompt_tokens_details"]["cached_tokens"]
    assert all(len(home) == 1 for home in homes.values()), homes
    assert len({name for home in homes.values() for name in home}) == 2, "all conversations on one replica"
    assert cached > 0


def test_a_client_that_leaves_ends_its_request(client: Client, folder: Path) -> None:
    response = client.open({**LONG, "stream": True})
    assert response.readline().startswith(b"data: ")
    assert "status=499" not in logs(folder, response.headers["x-microscale-replica"])
    response.close()
    name = response.headers["x-microscale-replica"]
    wait_for("the request's end", lambda: "status=499" in logs(folder, name))


def test_other_routes_and_errors_are_those_of_a_server(client: Client) -> None:
    status, text = client.get("/v1/models")
    assert status == 200
    assert json.loads(text)["data"][0]["id"] == "microscale-demo"
    assert client.get("/v1/none")[0] == 404
    reply = client.stream({"prompt": 5.5})
    assert (reply.status, reply.errors[0]["type"]) == (400, "invalid_request_error")
    response = client.open({"prompt": "1 + 1 =", "max_tokens": 3})
    assert response.headers.get_all("x-request-id") is not None
    assert len(response.headers.get_all("x-request-id") or ()) == 1
    assert json.loads(response.read())["usage"]["completion_tokens"] <= 3
    # A name that a web page pointed at this machine.
    assert client.get("/v1/models", {"Host": "evil.example"})[0] == 403


@pytest.mark.parametrize("stream", [True, False])
def test_a_stored_response_is_continued_where_it_is_kept(client: Client, stream: bool) -> None:
    def ask(**more: Any) -> str:
        request = {"input": "2 + 2 =", "max_output_tokens": 4, "stream": stream, **more}
        response = client.open(request, "/v1/responses")
        text = response.read().decode()
        assert response.status == 200, text
        homes.add(response.headers["x-microscale-replica"])
        return str(re.findall(r'"id": ?"(resp_[0-9a-f]+)"', text)[0])

    for _ in range(3):
        homes: set[str] = set()
        last = ask()
        for _ in range(4):
            last = ask(previous_response_id=last)
        assert len(homes) == 1
        assert client.get(f"/v1/responses/{last}")[0] == 200
    assert client.get("/v1/responses/resp_0")[0] == 404


def test_an_application_that_ends_lets_its_streams_finish(client: Client, folder: Path) -> None:
    """The last test of the application without keys: it is deleted, and one with keys takes its place."""
    reply = Reply()
    thread = threading.Thread(target=client.stream, args=(body(7, 100), reply))
    thread.start()
    wait_for("the first token", lambda: reply.num_events > 0)
    serve.delete("microscale")
    thread.join()
    assert whole(reply, 100), (reply.errors, reply.broken, reply.usage)
    key_file = folder / "keys"
    key_file.write_text("right\n")
    scaled = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1}
    serve_run(folder, config({**ARGS, **scaled, "api_key_file": str(key_file)}, client.port))
    wait_for("a replica", client.is_ready)
    for key, status in ((None, 401), ("wrong", 401), ("right", 200)):
        assert Client(client.port, key).stream(body(1, 2)).status == status
    assert "right" not in json.dumps(serve.status().applications["microscale"].__dict__, default=str)


def test_requests_that_pile_up_bring_a_second_replica(client: Client) -> None:
    """With the application that the last test has left: one replica, and two at most."""
    assert len(replica_pids()) == 1
    owner = Client(client.port, "right")
    enough = threading.Event()
    replies: list[Reply] = []

    def ask() -> None:
        while not enough.is_set():
            replies.append(owner.stream(body(len(replies))))

    with ThreadPoolExecutor(6) as pool:
        work = [pool.submit(ask) for _ in range(6)]
        try:
            wait_for("a second replica that answers", lambda: len({reply.replica for reply in list(replies)}) == 2)
        finally:
            enough.set()
        for each in work:
            each.result()
    assert all(map(whole, replies))
