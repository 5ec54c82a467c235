"""Parts of an answer are sent together, and answers of jobs' threads come with one wake-up of the loop."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.api.http.joining import JOINED_BYTES_MAX, JoinedTransport
from holdfast.api.http.outcomes import Outcomes


class Recorded(asyncio.Transport):
    """What reaches the transport below, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.wrote = asyncio.Event()

    def write(self, data: Any) -> None:
        self.seen.append(bytes(data))
        self.wrote.set()

    def close(self) -> None:
        self.seen.append("close")

    def abort(self) -> None:
        self.seen.append("abort")

    def get_write_buffer_size(self) -> int:
        return 100


async def _joined() -> tuple[Recorded, JoinedTransport]:
    below = Recorded()
    return below, JoinedTransport(below, asyncio.get_running_loop())


def test_parts_are_one_write_and_wait_only_for_so_long() -> None:
    async def run() -> list[Any]:
        below, joined = await _joined()
        for part in (b"head", b"", b"body"):
            joined.write(part)
        assert below.seen == []
        assert joined.get_write_buffer_size() == 108
        joined.flush()
        below.wrote.clear()
        joined.write(b"head of a stream")
        async with asyncio.timeout(30):
            await below.wrote.wait()
        return below.seen

    assert asyncio.run(run()) == [b"headbody", b"head of a stream"]


def test_much_is_handed_on_at_once() -> None:
    """Or a stream that never waits would be kept whole, and no reader could slow it down."""

    async def run() -> list[Any]:
        below, joined = await _joined()
        joined.write(b"head")
        joined.write(b"x" * JOINED_BYTES_MAX)
        return list(below.seen)

    assert asyncio.run(run()) == [b"head" + b"x" * JOINED_BYTES_MAX]


@pytest.mark.parametrize(("end", "seen"), [("close", [b"last", "close"]), ("abort", ["abort"])])
def test_a_close_sends_what_was_written_and_an_abort_does_not(end: str, seen: list[Any]) -> None:
    async def run() -> list[Any]:
        below, joined = await _joined()
        joined.write(b"last")
        getattr(joined, end)()
        await asyncio.sleep(0)
        return below.seen

    assert asyncio.run(run()) == seen


def test_answers_that_come_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[list[int], int]:
        loop, outcomes, woken = asyncio.get_running_loop(), Outcomes(), list[Any]()
        wake = loop.call_soon_threadsafe

        def counted(*call: Any) -> Any:
            woken.append(call)
            return wake(*call)

        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        futures = [Future[int]() for _ in range(50)]
        waiting = [asyncio.create_task(outcomes.of(future)) for future in futures]
        await asyncio.sleep(0)

        def answer() -> None:
            for at, future in enumerate(futures):
                future.set_result(at)

        answering = threading.Thread(target=answer)
        answering.start()
        answering.join()  # the loop is busy meanwhile
        return await asyncio.gather(*waiting), len(woken)

    assert asyncio.run(run()) == (list(range(50)), 1)


def test_no_answer_is_lost_between_a_wake_up_and_the_next() -> None:
    async def run() -> int:
        outcomes = Outcomes()

        async def ask(pool: ThreadPoolExecutor) -> int:
            return sum([await outcomes.of(pool.submit(int, 1)) for _ in range(200)])

        with ThreadPoolExecutor(4) as pool:
            async with asyncio.timeout(30):
                return sum(await asyncio.gather(*(ask(pool) for _ in range(16))))

    assert asyncio.run(run()) == 16 * 200


def test_errors_come_as_they_are_and_who_leaves_cancels() -> None:
    async def run() -> None:
        outcomes, failing, left, done = Outcomes(), Future[int](), Future[int](), Future[int]()
        done.set_result(7)
        assert await outcomes.of(done) == 7
        waiting = asyncio.create_task(outcomes.of(failing))
        leaving = asyncio.create_task(outcomes.of(left))
        await asyncio.sleep(0)
        failing.set_exception(ZeroDivisionError("no"))
        with pytest.raises(ZeroDivisionError, match="no"):
            await waiting
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert left.cancelled()

    asyncio.run(run())


def test_an_answer_behind_the_end_of_the_loop_harms_nobody() -> None:
    loop, outcomes, future = asyncio.new_event_loop(), Outcomes(), Future[int]()
    waiting = loop.create_future()
    loop.close()
    future.add_done_callback(lambda _: outcomes._end(waiting, loop))
    future.set_result(1)
    assert not waiting.done()
