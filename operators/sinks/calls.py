"""Operations beyond those of storage, by which flows call users' objects: production performs them on the thread of one object, one
at a time; a test or the simulator may do something else instead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, cast

import msgspec

from holdfast.operators.base import CallThread
from holdfast.operators.functions.async_map import RetryStrategy
from holdfast.statebackends.secrets import hide_resolved
from holdfast.statebackends.storage.port import DelegatingStorage, Flow, Storage, transfers_of
from holdfast.statebackends.storage.transfers import TransferPool

log = logging.getLogger("holdfast.sinks")

TRIES = RetryStrategy(attempts_max=6, delay_ms=100, multiplier=2.0, delay_ms_max=2_000)
"""Calls in a row without a clear answer before the job fails over, and the pauses between them."""


class Call(msgspec.Struct, frozen=True):
    """A call of the user's object. Result: its result."""

    path: str
    """Names the object in traces."""
    call: Callable[[], Any]


class Pause(msgspec.Struct, frozen=True):
    """Wait before another try. Result: None."""

    path: str
    delay_ms: int


class CallPort(DelegatingStorage):
    """Storage for flows that call one object, on a thread of its own: operations of storage are passed on."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self._ends = threading.Event()

    @property
    def transfers(self) -> TransferPool:
        return transfers_of(self._storage)

    def execute(self, operation: Any) -> Any:
        match operation:
            case Call():
                return operation.call()
            case Pause():
                self._ends.wait(operation.delay_ms / 1000)
                return None
            case _:
                return super().execute(operation)

    def end(self) -> None:
        """Pauses are over: whoever waits is to see that its flow was cancelled. Any thread."""
        self._ends.set()


def call_flow(path: str, call: Callable[[], Any]) -> Flow[Any]:
    """One call."""
    return (yield cast(Any, Call(path, call)))


def pause_flow(path: str, delay_ms: int) -> Flow[None]:
    """One pause."""
    yield cast(Any, Pause(path, delay_ms))


def close_on(thread: CallThread, close: Callable[[], None], what: str) -> None:
    """Close an object behind the calls so far, on its thread, which then ends. Waits for neither: what a call under way may still
    do has to be harmless, as that of a process which died. `what`: names the object in the log."""

    def call() -> None:
        try:
            close()
        except Exception as error:
            log.warning("%s could not be closed: %s", what, hide_resolved(f"{type(error).__name__}: {error}"))

    thread.run(call, lambda result, error: None)
    thread.close()
