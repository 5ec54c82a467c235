"""Ctrl-C at any moment of a command that works for itself: it ends with EXIT_INTERRUPTED, and nothing of its target is left.

An interrupt is one whatever it is made into on its way: libraries turn it into errors, and users' functions swallow it."""

from __future__ import annotations

import importlib
import inspect
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import _GeneratorContextManager, contextmanager
from types import FrameType

import typer

from holdfast.api.cli import console
from holdfast.statebackends.errors import HoldfastError

EXIT_INTERRUPTED = 130
"""128 and the number of the signal, as shells have it."""
_TARGETS = "holdfast.statebackends.state_processor.writing"
"""Imported by commands that write: others need not wait for what it needs."""


class _Interrupts:
    """What has become of the command that runs now."""

    def __init__(self) -> None:
        self.interrupted = False
        self.ends = False
        """It has done what it was told to, or deletes what it did: there is nothing to interrupt."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        if self.ends or (self.interrupted and _is_left(frame)):
            return  # pressed again: the command ends already
        self.interrupted = True
        raise KeyboardInterrupt


_current = _Interrupts()


@contextmanager
def interruptible() -> Iterator[None]:
    """What runs within is ended by an interrupt: `typer.Exit(EXIT_INTERRUPTED)`, once its target is deleted."""
    global _current
    state = _current = _Interrupts()
    if _TARGETS in sys.modules:  # those of commands before this one in the same process are no business of it
        importlib.import_module(_TARGETS).forget_newest()
    on_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, state) if on_main else None
    try:
        try:
            yield
        except BaseException as error:
            if not (state.interrupted or isinstance(error, KeyboardInterrupt)):
                raise
            _clean_up(state)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        if state.interrupted:  # and somebody swallowed it
            _clean_up(state)
            raise typer.Exit(EXIT_INTERRUPTED)
    finally:
        state.ends = True
        if on_main:
            signal.signal(signal.SIGINT, before)


_BLOCK = inspect.unwrap(interruptible).__code__


def _is_left(frame: FrameType | None) -> bool:
    """The block has been left: what is raised now would pass by its end."""
    while frame is not None:
        leaving = frame.f_locals.get("self") if frame.f_code is _GeneratorContextManager.__exit__.__code__ else None
        if frame.f_code is _BLOCK or (leaving is not None and leaving.gen.gi_code is _BLOCK):
            return True
        frame = frame.f_back
    return False


def settle() -> None:
    """The command has done what it was told to and is about to say so: from here on there is nothing to interrupt.

    Raises KeyboardInterrupt if it was before, and somebody has swallowed that."""
    if _current.interrupted:
        raise KeyboardInterrupt
    _current.ends = True


def _clean_up(state: _Interrupts) -> None:
    state.ends = True
    if _TARGETS not in sys.modules:
        return
    try:
        importlib.import_module(_TARGETS).abandon_newest()
    except HoldfastError as error:
        console.show_error(error)
