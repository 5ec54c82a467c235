"""One command stream between the job's thread and its reader."""

from __future__ import annotations

import threading

from holdfast.barriers.messages import CancelTasks, NumberedCommand
from holdfast.coordinator.dispatcher.command_stream import Subscription


def command(number: int) -> NumberedCommand:
    return NumberedCommand(1, "s", number, CancelTasks(number))


def subscription(closed: list[Subscription] | None = None, commands_max: int = 10) -> Subscription:
    on_close = closed.append if closed is not None else lambda _subscription: None
    return Subscription(1, 0, "s", 4, on_close=on_close, commands_max=commands_max)


def test_commands_come_in_order_and_the_last_number_is_for_keep_alives() -> None:
    stream = subscription()
    assert stream.last_number == 4
    stream.push([command(5), command(6)])
    assert stream.get(0) == command(5)
    assert stream.take() == [command(6)]
    assert (stream.take(), stream.get(0), stream.last_number) == ([], None, 6)


def test_listener_is_told_of_commands_of_the_end_and_of_what_waits_already() -> None:
    stream = subscription()
    heard: list[str] = []
    stream.push([command(5)])
    stream.add_listener(lambda: heard.append("listener"))
    stream.push([command(6)])
    stream.end()
    stream.end()
    assert heard == ["listener"] * 3
    assert stream.closed
    assert len(stream.take()) == 2


def test_reader_that_leaves_is_reported_once() -> None:
    closed: list[Subscription] = []
    stream = subscription(closed)
    stream.close()
    stream.close()
    assert closed == [stream]
    assert stream.push([command(5)])
    assert stream.take() == []


def test_end_from_the_job_is_not_reported_back() -> None:
    closed: list[Subscription] = []
    stream = subscription(closed)
    stream.end()
    stream.close()
    assert closed == []


def test_reader_that_falls_behind_the_bound_loses_the_stream() -> None:
    stream = subscription(commands_max=2)
    assert stream.push([command(5), command(6)])
    assert not stream.push([command(7)])
    assert stream.closed
    assert stream.take() == []


def test_waiting_reader_wakes_up() -> None:
    stream = subscription()
    found: list[NumberedCommand | None] = []
    reader = threading.Thread(target=lambda: found.append(stream.get(10)))
    reader.start()
    stream.push([command(5)])
    reader.join(10)
    assert found == [command(5)]
