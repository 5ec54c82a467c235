"""SHELL: one read from several members: whichever answers first.

A member that hangs takes a connection and never answers. Asked one after the other, it would cost a person the whole timeout while
another one leads; so the next is asked beside it. For reads alone: what is sent twice is done twice."""

from __future__ import annotations

import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

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


def ask_first(
    urls: Sequence[str], ask: Callable[[str], T], further: Callable[[], Sequence[str]] | None = None
) -> tuple[str, Future[T]]:
    """Ask the first of the URLs, and the others by turns while none has answered for HEDGE_AFTER_S. Returns the one that answered
    first and its answer or error; an error of the member's own counts once nobody is left who may answer.

    `further`: finds more URLs, which may take long; called once none has answered for so long. Raises nothing."""
    ended: queue.SimpleQueue[tuple[str, Future[T]] | Sequence[str]] = queue.SimpleQueue()
    turns, lost = deque(urls), set[str]()
    started = waiting = 0
    wants = True
    while True:
        if wants and started < HEDGED_MAX:
            url = _next_of(turns, lost)
            if _is_started(functools.partial(_ask, url, ask, ended), is_only=waiting == 0):
                started, waiting = started + 1, waiting + 1
            else:
                started = HEDGED_MAX
        try:
            found = ended.get(timeout=HEDGE_AFTER_S)
        except queue.Empty:
            _begin(further, ended)
            further = None
            wants = len(set(turns) - lost) > 1
            continue
        if not isinstance(found, tuple):
            more = [url for url in found if url not in turns]
            turns.extendleft(reversed(more))
            wants = bool(more)  # the others have been silent for long enough
            continue
        url, answer = found
        wants, waiting, error = False, waiting - 1, answer.exception()
        if waiting == 0 or not isinstance(error, _OF_A_MEMBER):
            return url, answer
        if isinstance(error, ConnectionLostError):
            lost.add(url)


def _next_of(turns: deque[str], lost: set[str]) -> str:
    """The next that is not lost; it goes to the end of the queue."""
    while True:
        url = turns.popleft()
        turns.append(url)
        if url not in lost:
            return url


def _ask(url: str, ask: Callable[[str], T], ended: queue.SimpleQueue[tuple[str, Future[T]] | Sequence[str]]) -> None:
    answer: Future[T] = Future()
    try:
        answer.set_result(ask(url))
    except BaseException as error:
        answer.set_exception(error)
    ended.put((url, answer))


def _begin(further: Callable[[], Sequence[str]] | None, ended: queue.SimpleQueue[Any]) -> None:
    """Find more URLs, on a thread that nobody waits for."""
    if further is not None:
        _is_started(lambda: ended.put(list(further())), is_only=False)


def _is_started(run: Callable[[], None], *, is_only: bool) -> bool:
    """Run it on a thread of its own, which nobody waits for; where the system has none, the only request is made on this one."""
    try:
        threading.Thread(target=run, name="holdfast-read", daemon=True).start()
    except RuntimeError:
        if not is_only:
            return False
        run()
    return True
