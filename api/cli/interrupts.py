"""Ctrl-C at any moment of a command that works in its own process: it ends with EXIT_INTERRUPTED and leaves nothing of its target.

The command counts as interrupted even if the KeyboardInterrupt is lost: libraries turn it into errors, and users' functions swallow
it."""

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
"""128 plus the number of the signal, as in shells."""
_TARGETS = "holdfast.statebackends.state_processor.writing"
"""Imported only by commands that write; its imports take time."""


class _Interrupts:
    """Handler of SIGINT for the running command, and its state."""

    def __init__(self) -> None:
        self.interrupted = False
        self.ends = False
        """The command is complete, or deletes its target: there is nothing to interrupt."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self.ends or (self.interrupted and _is_left(frame)):
            return  # pressed again: the command ends already
        self.interrupted = True
        raise KeyboardInterrupt


_current = _Interrupts()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt end the block: raises `typer.Exit(EXIT_INTERRUPTED)` once its target is deleted."""
    global _current
    state = _current = _Interrupts()
    if _TARGETS in sys.modules:  # targets of earlier commands in the same process are not deleted
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
        if state.interrupted:  # and the exception was swallowed
            _clean_up(state)
            raise typer.Exit(EXIT_INTERRUPTED)
    finally:
        state.ends = True
        if on_main:
            signal.signal(signal.SIGINT, before)


_BLOCK = inspect.unwrap(interruptible).__code__


def _is_left(frame: FrameType | None) -> bool:
    """Whether the block is being left: an exception raised now would bypass its end."""
    while frame is not None:
        leaving = frame.f_locals.get("self") if frame.f_code is _GeneratorContextManager.__exit__.__code__ else None
        if frame.f_code is _BLOCK or (leaving is not None and leaving.gen.gi_code is _BLOCK):
            return True
        frame = frame.f_back
    return False


def settle() -> None:
    """Mark the command as complete: from here on there is nothing to interrupt. To be called before its result is printed.

    Raises KeyboardInterrupt if the command was interrupted before and the exception was swallowed."""
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
