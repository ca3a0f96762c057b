"""The engine process and its client, with real processes: what requests get, and that no end is a hang."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from microscale.engine.client import launch as launching
from microscale.engine.client.client import EngineClient
from microscale.engine.client.launch import EngineProcess
from microscale.engine.client.stream import Stream
from microscale.engine.config import EngineConfig
from microscale.engine.loading.build import Queueing, build_engine
from microscale.engine.loading.prepare import prepare
from microscale.engine.output import Output
from microscale.engine.process.loop import QUIET_S
from microscale.engine.protocol.frames import FrameReader
from microscale.engine.protocol.heartbeat import Heartbeat
from microscale.engine.protocol.messages import (
    VERSION,
    Abort,
    Failed,
    FromEngine,
    GetStats,
    Hello,
    LoadEngine,
    Loading,
    Ready,
    Submit,
    check_hello,
    decode_for_owner,
    encode,
)
from microscale.engine.request import Finish, Request
from microscale.engine.sampling_params import SamplingParams
from microscale.errors import (
    BadCheckpoint,
    BadMessage,
    BadRequest,
    BadSetting,
    Draining,
    EngineDied,
    MicroscaleError,
    QueueFull,
)
from microscale.models.config import PAGED
from support.mock_runner import next_token
from support.mock_service import PAGES, VOCAB, WINDOW

TESTS = Path(__file__).parents[2]
PROCESS = (sys.executable, "-m", "microscale.engine.process")
COUNTING = (*PROCESS, "--factory", "support.counting_service:load")
MOCK = (*PROCESS, "--factory", "support.mock_service:load")
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module", autouse=True)
def _children_find_support() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]))
        yield


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One loop for all tests of this module, since a client belongs to one. Nothing may take longer than 30 s."""
    with asyncio.Runner() as runner:
        yield lambda work: runner.run(asyncio.wait_for(work, 30))


@pytest.fixture(scope="module")
def engine(run: Run) -> Iterator[EngineClient]:
    """The real engine over the mock model, in a process."""
    config = EngineConfig("mock", max_num_seqs=8, max_num_batched_tokens=64, max_queue=64, block_size=4)
    client = run(EngineClient.start(config, EngineProcess(MOCK)))
    yield client
    run(client.close())


def request(name: str, prompt: list[int], max_tokens: int, **params: Any) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params))


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, WINDOW, VOCAB))
    return tokens[len(prompt) :]


async def tokens_of(stream: Stream) -> list[int | None]:
    return [output.token async for output in stream]


async def counting(model: str = "", **launch: Any) -> EngineClient:
    return await EngineClient.start(EngineConfig(model, drain_s=20.0), EngineProcess(COUNTING, **launch))


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


# ---- requests --------------------------------------------------------------------------------------------------------


def test_many_requests_get_their_own_tokens(run: Run, engine: EngineClient) -> None:
    assert (engine.ready.vocab_size, engine.ready.max_model_len, engine.ready.plan) == (VOCAB, 512, "mock")

    async def one(index: int) -> None:
        prompt = [(7 * index + j) % VOCAB for j in range(1 + index)]
        stream = await engine.submit(request(f"r{index}", prompt, 5 + index))
        outputs = [output async for output in stream]
        assert [output.token for output in outputs] == alone(prompt, 5 + index)
        assert [output.finish for output in outputs] == [None] * (4 + index) + [Finish.LENGTH]
        assert all(output.logprob is not None and output.logprob <= 0 for output in outputs)
        assert await stream.take() == []

    async def all_at_once() -> None:
        await asyncio.gather(*(one(index) for index in range(40)))

    run(all_at_once())


def test_what_a_request_asks_arrives(run: Run, engine: EngineClient) -> None:
    async def ask(**params: Any) -> list[Output]:
        return [output async for output in await engine.submit(request("r", [1, 2, 3], 8, **params))]

    stopped = run(ask(stop_token_ids=(alone([1, 2, 3], 8)[3],), logprobs=2))
    assert [output.token for output in stopped] == alone([1, 2, 3], 8)[:4]
    assert stopped[-1].finish is Finish.STOP
    assert all(output.top_logprobs[0] == (output.token, output.logprob) for output in stopped)
    assert all(len(output.top_logprobs) == 2 for output in stopped)
    biased = run(ask(logit_bias={50: 100.0}))
    assert [output.token for output in biased] == [50] * 8


@pytest.mark.parametrize("how", ["abort", "close", "let go", "leave", "cancel"])
def test_an_end_in_mid_stream_frees_the_pages(run: Run, engine: EngineClient, how: str) -> None:
    async def begin(arrived: asyncio.Event) -> None:
        stream = await engine.submit(request("long", [1] * 40, 400))
        assert (await anext(stream)).token == alone([1] * 40, 1)[0]
        arrived.set()
        if how == "abort":
            assert await engine.abort("long")
            assert not await engine.abort("long")
            assert [output.finish for output in await stream.take()][-1] is Finish.ABORT
            assert await stream.take() == []
        elif how == "close":
            await stream.aclose()
        elif how == "leave":
            async with stream:
                pass
        elif how == "cancel":
            await asyncio.sleep(3600)

    async def whole() -> None:
        arrived = asyncio.Event()
        task = asyncio.create_task(begin(arrived))
        await arrived.wait()
        if how == "cancel":
            during = await engine.stats()
            assert during.num_running == 1
            assert all(used > 0 for used, _ in during.pages.values())
            task.cancel()
        await asyncio.wait((task,))
        assert task.cancelled() or task.exception() is None
        del task
        gc.collect()
        await asyncio.sleep(0)  # the abort of a stream that was let go is the loop's
        after = await engine.stats()
        assert after.num_running == after.num_waiting == 0
        assert after.pages == {kind.value: (0, PAGES) for kind in PAGED}
        # The id is free, and nothing of the old request comes to the new one.
        again = await engine.submit(request("long", [2], 3))
        assert await tokens_of(again) == alone([2], 3)

    run(whole())


def test_a_slow_reader_holds_up_nobody(run: Run, engine: EngineClient) -> None:
    async def ask() -> None:
        slow = await engine.submit(request("slow", [3], 50))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(await engine.submit(request("other", [4], 400))), 0)
        quick = await engine.submit(request("quick", [5], 100))
        assert await tokens_of(quick) == alone([5], 100)
        # All of it has come in the meantime, and comes together.
        assert [output.token for output in await slow.take()] == alone([3], 50)
        assert await slow.take() == []

    run(ask())


def test_an_owner_that_does_not_read_loses_nothing(run: Run) -> None:
    """4000 steps make 2.8 MB: more than the socket holds and the process keeps for its owner."""

    async def ask() -> list[int | None]:
        async with await counting("hurries") as client:
            stream = await client.submit(request("r", [0], 4000))
            time.sleep(0.3)  # the whole loop stands still
            return await tokens_of(stream)

    assert run(ask()) == list(range(1, 4001))


def test_a_wait_that_is_given_up_loses_nothing(run: Run, engine: EngineClient) -> None:
    async def ask() -> list[int | None]:
        stream = await engine.submit(request("r", [6], 60))
        tokens: list[int | None] = []
        while True:
            try:
                tokens.append((await asyncio.wait_for(anext(stream), 0.0005)).token)
            except TimeoutError:
                continue
            except StopAsyncIteration:
                return tokens

    assert run(ask()) == alone([6], 60)


def test_refusals_come_in_their_own_class(run: Run, engine: EngineClient) -> None:
    async def refused(error: type[MicroscaleError], sentence: str, wanted: Request) -> None:
        with pytest.raises(error, match=sentence) as caught:
            await engine.submit(wanted)
        assert type(caught.value) is error

    async def ask() -> None:
        await refused(BadRequest, "Token id 97 is not in the vocabulary of 97", request("r", [97], 1))
        await refused(BadRequest, "The prompt is empty", request("r", [], 1))
        await refused(BadRequest, "exceed the context of 512", request("r", [1], 512))
        await refused(BadRequest, r"The engine cannot accept this: .*\$.prompt", request("r", [1] * (2**20 + 1), 1))
        await refused(BadRequest, r"The engine cannot accept this: .*\$.prompt", request("r", [-1], 1))
        # 8 run and 64 wait; of 80 some must be refused, and those that are not run on.
        asked = [engine.submit(request(f"r{index}", [1], 400)) for index in range(80)]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        full = [answer for answer in answers if isinstance(answer, QueueFull)]
        assert len(full) >= 8
        assert "64 requests are waiting already" in str(full[0])
        streams = [answer for answer in answers if isinstance(answer, Stream)]
        assert len(streams) == 80 - len(full)
        # The last that was taken waits for many others.
        last = max(index for index, answer in enumerate(answers) if isinstance(answer, Stream))
        await refused(BadRequest, f"'r{last}' is already here", request(f"r{last}", [1], 1))
        for stream in streams:
            stream.close()
        assert (await engine.stats()).num_waiting == 0

    run(ask())


def test_the_engine_serves_a_real_model(run: Run) -> None:
    config = EngineConfig(
        "gpt-oss-tiny", load_format="dummy", device="cpu", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64
    )
    wanted = [request(f"r{index}", [5 + index] * (3 + 20 * index), 12, ignore_eos=True) for index in range(3)]
    heard: list[tuple[int, int]] = []

    async def ask() -> list[list[int | None]]:
        launch = EngineProcess(on_progress=lambda done, total: heard.append((done, total)))
        async with await EngineClient.start(config, launch) as client:
            assert (client.ready.vocab_size, client.ready.max_model_len) == (512, 128)
            assert client.ready.eos_token_ids == (511,)
            assert "experts" in client.ready.plan
            return await asyncio.gather(*[tokens_of(await client.submit(one)) for one in wanted])

    told = run(ask())
    total = heard[0][1]
    assert total > 10_000
    assert heard == [(total * layers // 4, total) for layers in range(5)]
    here = build_engine(prepare(config), Queueing()).engine
    for one in wanted:
        here.submit(one)
    while here.has_work:
        here.step()
    assert told == [one.tokens[one.num_prompt :] for one in wanted]


# ---- the end of a process --------------------------------------------------------------------------------------------


async def die(client: EngineClient, how: Callable[[int], None], sentence: str) -> None:
    """Requests are open, the process comes to an end, and everybody is told."""
    pid = client.pid
    open_streams = [await client.submit(request(f"r{index}", [100 * index], 10**6)) for index in range(1, 4)]
    for stream in open_streams:
        await anext(stream)
    waiting = [asyncio.create_task(tokens_of(stream)) for stream in open_streams]
    how(pid)
    for task in waiting:
        with pytest.raises(EngineDied, match=sentence):
            await task
    for later in (client.submit(request("late", [1], 1)), client.stats(), client.abort("r1"), client.drain(1.0)):
        with pytest.raises(EngineDied, match=sentence):
            await later
    assert sentence in str(await client.wait_ended())
    await client.close()
    assert gone(pid)


def test_a_killed_process_fails_its_requests(run: Run) -> None:
    async def whole() -> None:
        client = await counting()
        await die(client, lambda pid: os.kill(pid, signal.SIGKILL), "was killed by SIGKILL")
        async with await counting() as another:
            assert await tokens_of(await another.submit(request("r", [1], 3))) == [2, 3, 4]

    run(whole())


def test_a_failing_step_fails_its_requests(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    async def whole() -> None:
        client = await counting("fails in a step")
        # Together: the engine has counted to five before a second submission would reach it.
        asked = [request("counts to five", [1], 100), request("r", [50], 9)]
        streams = await asyncio.gather(*map(client.submit, asked))
        with pytest.raises(EngineDied, match="failed: ZeroDivisionError: five is too much"):
            await tokens_of(streams[0])
        with pytest.raises(EngineDied, match="failed: ZeroDivisionError"):
            await tokens_of(streams[1])
        await client.close()

    run(whole())
    assert "Traceback" in capfd.readouterr().err


def test_a_hung_step_fails_its_requests(run: Run) -> None:
    async def whole() -> None:
        client = await counting("hangs in a step")
        await asyncio.sleep(1.0)  # an engine without work may be silent
        asked = client.submit(request("r", [1], 9))
        with pytest.raises(EngineDied, match=r"takes longer than 0.5 s, which no step should; it was killed"):
            await tokens_of(await asked)
        await client.close()
        assert gone(client.pid)

    run(whole())


def test_work_ahead_gives_way_to_a_request(run: Run) -> None:
    """The service goes on for ever unless it is told."""

    async def whole() -> None:
        async with await counting("works ahead") as client:
            for prompt in ([7], [40]):
                await asyncio.sleep(3 * QUIET_S)
                assert await tokens_of(await client.submit(request("r", prompt, 2))) == [prompt[0] + 1, prompt[0] + 2]

    run(whole())


def test_a_process_that_was_started_ahead_is_taken_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "COMMAND", COUNTING)
    launching.start_ahead()
    assert launching._ahead is not None
    ahead = launching._ahead.pid

    async def whole() -> None:
        async with await counting() as first, await counting() as second:
            assert (first.pid, second.pid != ahead) == (ahead, True)
            for client in (first, second):
                assert await tokens_of(await client.submit(request("r", [7], 2))) == [8, 9]

    run(whole())
    assert gone(ahead)


def test_what_the_engine_cannot_accept(run: Run) -> None:
    config = EngineConfig("m", gpu_memory_utilization=2.0)
    with pytest.raises(BadSetting, match=r"^The engine cannot accept this: .*\$.config.gpu_memory_utilization"):
        run(EngineClient.start(config, EngineProcess(COUNTING)))


def test_a_process_that_nobody_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an option is wrong: its owner leaves, and with it our end of the socket."""
    monkeypatch.setattr(launching, "COMMAND", COUNTING)
    launching.start_ahead()
    left, launching._ahead = launching._ahead, None
    assert left is not None
    left.sock.close()
    assert left._process.wait(30) == 0


def test_a_request_that_waits_for_its_answer_can_be_given_up(run: Run) -> None:
    async def whole() -> None:
        async with await counting("hangs in a step") as client:
            stream = await client.submit(request("holds up all", [1], 9))
            cancelled, aborted = (asyncio.create_task(client.submit(request(name, [1], 9))) for name in "ca")
            await asyncio.sleep(0.05)
            cancelled.cancel()
            assert await client.abort("a")
            assert [output.finish for output in await (await aborted).take()] == [Finish.ABORT]
            await asyncio.wait((cancelled,))
            assert cancelled.cancelled()
            assert not await client.abort("c")
        with pytest.raises(EngineDied, match="The engine was closed"):
            await anext(stream)

    run(whole())


@pytest.mark.parametrize(
    "model, error, sentence",
    [
        ("crashes at load", MicroscaleError, "ZeroDivisionError: no such thing"),
        ("is damaged", BadCheckpoint, "model.safetensors is cut off; download it again."),
        ("hangs at load", EngineDied, "has not loaded its model in 0.7 s"),
    ],
)
def test_a_load_that_fails_says_why(run: Run, model: str, error: type[MicroscaleError], sentence: str) -> None:
    with pytest.raises(error, match=sentence) as caught:
        run(counting(model, load_timeout_s=0.7 if "hangs" in model else 20.0))
    assert type(caught.value) is error


def test_a_configuration_that_cannot_be_read_is_refused_here(run: Run) -> None:
    with pytest.raises(BadSetting, match=r"\$.config.gpu_memory_utilization"):
        run(EngineClient.start(EngineConfig("m", gpu_memory_utilization=2.0)))
    with pytest.raises(EngineDied, match="cannot be started"):
        run(EngineClient.start(EngineConfig("m"), EngineProcess(("/nowhere/python",))))


GREETS = encode(Hello(VERSION)) + encode(Ready(9, 9, (), ""))


@pytest.mark.parametrize(
    "says, sentence",
    [
        (b"", "ended with status 3"),
        (b"\xff" * 64, "A message has 4294967295 bytes"),
        (b"\0\0\0\1\xc1", "cannot be read"),
        (GREETS[:-3], "ended with status 3"),
        (encode(Hello(VERSION + 1)), rf"speaks version {VERSION + 1} .* this one version {VERSION}"),
        (encode(Hello(VERSION)) + encode(Loading(1, 2)) * 3 + b"\0\0\0\0", "A message has 0 bytes"),
        (encode(Hello(VERSION)) + encode(Failed(BadCheckpoint("damaged"))), "damaged"),
    ],
    ids=["nothing", "noise", "no message", "cut off", "later version", "empty", "failed"],
)
def test_a_process_that_speaks_nonsense_at_the_start(run: Run, says: bytes, sentence: str) -> None:
    script = f"import os, sys; os.write(int(sys.argv[-1]), {says!r}); os.read(int(sys.argv[-1]), 9); sys.exit(3)"
    with pytest.raises(BadCheckpoint if sentence == "damaged" else EngineDied, match=sentence):
        run(EngineClient.start(EngineConfig("m"), EngineProcess((sys.executable, "-S", "-c", script))))


@pytest.mark.parametrize(
    "says",
    [b"\xff" * 64, b"\0\0\0\1\xc1", encode(Ready(9, 9, (), "")), encode(Loading(1, 1))],
    ids=["noise", "no message", "ready", "loading"],
)
def test_a_process_that_speaks_nonsense_later(run: Run, says: bytes) -> None:
    # It greets, waits for the first request, answers with nonsense, and does not end by itself.
    script = (
        f"import os, sys, time; fd = int(sys.argv[-1]); os.read(fd, 9999); os.write(fd, {GREETS!r})\n"
        f"os.read(fd, 1); os.write(fd, {says!r}); time.sleep(60)"
    )

    async def whole() -> None:
        client = await EngineClient.start(EngineConfig("m"), EngineProcess((sys.executable, "-S", "-c", script)))
        asked = [asyncio.create_task(client.submit(request("r", [1], 1))), asyncio.create_task(client.stats())]
        for task in asked:
            with pytest.raises(EngineDied, match="sent an invalid message and was killed"):
                await task
        await client.close()
        assert gone(client.pid)

    run(whole())


# ---- draining --------------------------------------------------------------------------------------------------------


def test_drain_finishes_what_is_there(run: Run) -> None:
    async def whole() -> None:
        client = await counting()
        stream = await client.submit(request("r", [0], 80))
        draining = asyncio.create_task(client.drain(20.0))
        await asyncio.sleep(0)
        with pytest.raises(Draining, match="takes no new requests"):
            await client.submit(request("late", [1], 1))
        assert await tokens_of(stream) == list(range(1, 81))
        assert await draining == 0
        assert gone(client.pid)
        with pytest.raises(EngineDied, match="has drained"):
            await client.submit(request("later", [1], 1))

    run(whole())


def test_drain_aborts_what_does_not_finish(run: Run) -> None:
    async def whole() -> None:
        client = await counting()
        stream = await client.submit(request("r", [0], 10**6))
        assert await client.drain(0.1) == 1
        outputs = await stream.take()
        assert (outputs[-1].token, outputs[-1].finish) == (None, Finish.ABORT)

    run(whole())


def test_sigterm_drains(run: Run) -> None:
    async def whole() -> None:
        idle, busy = await asyncio.gather(counting(), counting())
        stream = await busy.submit(request("r", [0], 80))
        for client in (idle, busy):
            os.kill(client.pid, signal.SIGTERM)
        assert await tokens_of(stream) == list(range(1, 81))
        for client in (idle, busy):
            assert "has drained" in str(await client.wait_ended())
            await client.close()

    run(whole())


# ---- the other side: an owner that is gone, or speaks nonsense -------------------------------------------------------


class Owner:
    """The owner's end of the socket, by hand."""

    def __init__(self, *command: str) -> None:
        self.sock, theirs = socket.socketpair()
        self.sock.settimeout(20)
        heartbeat = Heartbeat.create()
        with theirs:
            self.process = subprocess.Popen(
                [*command, "--heartbeat", str(heartbeat.file), "--fd", str(theirs.fileno())],
                pass_fds=(heartbeat.file, theirs.fileno()),
                stderr=subprocess.PIPE,
                text=True,
            )
        heartbeat.close_file()
        self._frames = self._read()

    def say(self, data: bytes) -> None:
        self.sock.sendall(data)

    def wait_for_hello(self) -> None:
        check_hello(next(self._frames))

    def wait_for(self, kind: type[FromEngine]) -> None:
        self.wait_for_hello()
        while not isinstance(decode_for_owner(next(self._frames)), kind):
            pass

    def rest(self) -> list[bytes]:
        """All messages up to the end."""
        return list(self._frames)

    def _read(self) -> Iterator[bytes]:
        reader = FrameReader()
        # A process that goes before it has read all resets the connection, once what it said is read.
        with suppress(ConnectionResetError):
            while data := self.sock.recv(2**16):
                yield from reader.feed(data)

    def close(self) -> None:
        self.sock.close()
        self.process.kill()
        self.process.communicate()


def load_message(model: str = "") -> bytes:
    return encode(Hello(VERSION)) + encode(LoadEngine(EngineConfig(model)))


@pytest.mark.parametrize("model, until", [("hangs at load", Loading), ("", Ready), ("hangs in a step", Ready)])
def test_a_process_without_an_owner_ends(model: str, until: type[FromEngine]) -> None:
    with closing(Owner(*COUNTING)) as owner:
        owner.say(load_message(model))
        owner.wait_for(until)
        if until is Ready:
            owner.say(encode(Submit("r", (1,), SamplingParams(max_tokens=10**6))))
        owner.sock.close()
        assert owner.process.wait(10) == 0


@pytest.mark.parametrize(
    "first, then, sentence",
    [
        (
            encode(Hello(VERSION + 1)),
            b"",
            f"version {VERSION + 1} of Microscale's messages and this one version {VERSION}",
        ),
        (encode(Hello(VERSION)) + encode(GetStats()), b"", "second message must be LoadEngine and is GetStats"),
        (load_message(), encode(LoadEngine(EngineConfig(""))), "The engine is loaded already"),
        (load_message(), b"\xff" * 9, "A message has 4294967295 bytes"),
        (load_message(), encode(Abort("7")) + encode(Abort("")), "cannot be read"),
    ],
    ids=["later version", "no load", "second load", "oversize", "out of bounds"],
)
def test_an_owner_that_speaks_nonsense_is_told(first: bytes, then: bytes, sentence: str) -> None:
    with closing(Owner(*COUNTING)) as owner:
        owner.say(first)
        if then:
            owner.wait_for(Ready)
            owner.say(then)
        else:
            owner.wait_for_hello()
        failed = decode_for_owner(owner.rest()[-1])
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, BadMessage)
        assert sentence in str(failed.error)
        _, log = owner.process.communicate(timeout=5)
        assert owner.process.returncode == 2
        assert "Traceback" not in log
