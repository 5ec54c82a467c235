"""SHELL: one read from several members: whichever answers first.

A member that hangs takes a connection and never answers. Asked one after the other, it would cost a person the whole timeout while
another one leads; so the next is asked beside it. For reads alone: what is sent twice is done twice."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from holdfast.api.errors import ConnectionLostError
from holdfast.statebackends.errors import NotLeaderError, RecoveringError, StorageUnavailableError

HEDGE_AFTER_S = 3.0
"""Time without an answer after which the next member is asked, too; longer than any usual answer takes."""

HEDGED_MAX = 4
"""Requests of one read. Members are asked more than once: one that stands by passes the request on to the one that hangs, until it
takes over. A leader that is slow and does not hang has so many copies to answer, whoever passed them on."""

_OF_A_MEMBER = (ConnectionLostError, StorageUnavailableError, RecoveringError, NotLeaderError)
"""Errors that say nothing of what was asked for: another member may know better."""

T = TypeVar("T")


def ask_first(urls: Sequence[str], ask: Callable[[str], T]) -> tuple[str, Future[T]]:
    """Ask the first of the URLs, and the others by turns while none has answered for HEDGE_AFTER_S. Returns the one that answered
    first and its answer or error; an error of the member's own counts once nobody is left who may answer."""
    ended: queue.SimpleQueue[tuple[str, Future[T]]] = queue.SimpleQueue()
    lost: set[str] = set()
    started = waiting = 0
    turns = itertools.cycle(urls)
    wants = True
    while True:
        if wants and started < HEDGED_MAX:
            url = next(each for each in turns if each not in lost)
            if _is_started(url, ask, ended, is_only=waiting == 0):
                started, waiting = started + 1, waiting + 1
            else:
                started = HEDGED_MAX
        try:
            url, answer = ended.get(timeout=HEDGE_AFTER_S)
        except queue.Empty:
            wants = len(set(urls) - lost) > 1
            continue
        wants, waiting, error = False, waiting - 1, answer.exception()
        if waiting == 0 or not isinstance(error, _OF_A_MEMBER):
            return url, answer
        if isinstance(error, ConnectionLostError):
            lost.add(url)


def _is_started(
    url: str, ask: Callable[[str], T], ended: queue.SimpleQueue[tuple[str, Future[T]]], *, is_only: bool
) -> bool:
    """Ask on a thread of its own, which nobody waits for; where the system has none, the only request is made on this one."""

    def run() -> None:
        answer: Future[T] = Future()
        try:
            answer.set_result(ask(url))
        except BaseException as error:
            answer.set_exception(error)
        ended.put((url, answer))

    try:
        threading.Thread(target=run, name="holdfast-read", daemon=True).start()
    except RuntimeError:
        if not is_only:
            return False
        run()
    return True
