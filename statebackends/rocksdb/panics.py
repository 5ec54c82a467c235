"""Panics of native libraries. pyo3 raises them as a BaseException, so that nobody takes them for an error that was thought of; and
they would end whoever calls, with all that belongs to others. Here a panic is a failure of what was being done.

Which class that is can't be imported: every library has one of its own, made at its first panic."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    return any(kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime" for kind in type(error).__mro__)


def failure_of(error: BaseException) -> BaseException:
    """`error`, if the work that raised it failed by it. Raises it if it ends the one who does the work: an interrupt, an exit, the
    end of a generator."""
    if isinstance(error, Exception) or is_panic(error):
        return error
    raise error
