"""A stream's tap: it takes tokens only while the reader waits, in order, and its mistakes are the reader's."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise, takewhile

import pytest

from microscale.engine.client.stream import OpenRequest, Stream
from microscale.engine.output import Output
from microscale.engine.request import Finish


def put(request: OpenRequest, *tokens: int, finish: Finish | None = None) -> None:
    """As the client does it with what came at once."""
    outputs = [Output("a", token) for token in tokens]
    request.deliver([*outputs, Output("a", None, finish=finish)] if finish else outputs)


def opened() -> tuple[OpenRequest, Stream]:
    request = OpenRequest("1", "a", asyncio.get_running_loop().create_future())
    return request, Stream(request, lambda request: None)


def test_tokens_are_taken_in_order_by_the_tap_or_by_the_reader() -> None:
    async def main() -> None:
        request, stream = opened()
        order: list[int] = []
        tapped: list[int] = []
        chooser = random.Random(0)

        def no_threes(tokens: list[int]) -> int:
            taken = list(takewhile(lambda token: token % 3 != 0, tokens))
            order.extend(taken)
            tapped.extend(taken)
            return len(taken)

        async def read() -> None:
            while outputs := await stream.take():
                await asyncio.sleep(0)  # meanwhile it does not wait for tokens, and none may overtake these
                order.extend(-1 if output.token is None else output.token for output in outputs)

        stream.tap(no_threes)
        put(request, 0)  # nobody waits yet
        reading = asyncio.create_task(read())
        token = 1
        while token < 100:
            count = chooser.choice((1, 1, 2, 5))
            put(request, *range(token, token + count))
            token += count
            for _ in range(chooser.choice((0, 1, 4))):
                await asyncio.sleep(0)
        put(request, token, token + 1, finish=Finish.STOP)
        await reading
        assert order == [*range(token + 2), -1]
        assert any(first + 1 == second for first, second in pairwise(tapped))

    asyncio.run(main())


def test_what_a_tap_raises_the_reader_hears() -> None:
    async def main() -> None:
        request, stream = opened()
        stream.tap(lambda tokens: 1 // tokens[0])
        reading = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        put(request, 1)
        put(request, 0)
        put(request, 2)
        with pytest.raises(ZeroDivisionError):
            await reading
        assert [output.token for output in await stream.take()] == [2]

    asyncio.run(main())
