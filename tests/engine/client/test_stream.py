"""A stream's tap: it takes tokens only while the reader waits, in order, and its mistakes are the reader's."""

from __future__ import annotations

import asyncio

import pytest

from microscale.engine.client.stream import OpenRequest, Stream
from microscale.engine.output import Output
from microscale.engine.protocol.frames import FrameReader, frame
from microscale.engine.request import Finish


def put(request: OpenRequest, token: int, finish: Finish | None = None) -> None:
    """As the client does it."""
    if finish is not None or not request.offer(token):
        request.put(Output("a", token, finish=finish))


def opened() -> tuple[OpenRequest, Stream]:
    request = OpenRequest("1", "a", asyncio.get_running_loop().create_future())
    return request, Stream(request, lambda request: None)


def test_tokens_are_taken_in_order_by_the_tap_or_by_the_reader() -> None:
    async def main() -> None:
        request, stream = opened()
        order: list[int] = []

        def even(token: int) -> bool:
            if token % 2:
                return False
            order.append(token)
            return True

        async def read() -> None:
            while outputs := await stream.take():
                await asyncio.sleep(0)  # meanwhile it does not wait for tokens, and none may overtake these
                order.extend(output.token or 0 for output in outputs)

        stream.tap(even)
        put(request, 0)  # nobody waits yet
        reading = asyncio.create_task(read())
        for token in range(1, 40):
            put(request, token)
            if token % 3 == 0:
                await asyncio.sleep(0)
        put(request, 40, Finish.STOP)
        await reading
        assert order == list(range(41))

    asyncio.run(main())


def test_what_a_tap_raises_the_reader_hears() -> None:
    async def main() -> None:
        request, stream = opened()
        stream.tap(lambda token: bool(1 // token))
        reading = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        put(request, 1)
        put(request, 0)
        put(request, 2)
        with pytest.raises(ZeroDivisionError):
            await reading
        assert [output.token for output in await stream.take()] == [2]

    asyncio.run(main())


def test_a_reader_of_frames_knows_whether_it_keeps_up() -> None:
    reader = FrameReader()
    one = frame(b"one")
    for data, keeps_up in ((one, True), (one + one, False), (one, True), (one[:3], False), (one[3:], False)):
        list(reader.feed(data))
        assert reader.keeps_up is keeps_up
