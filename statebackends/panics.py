"""Which exceptions are failures of the work that raised them, panics of native libraries among them.

A panic of a library made with pyo3 is a BaseException, which would end the calling thread with all of its work. Its class can't be
imported: each library makes one of its own, at its first panic. So this module loads no library, and what catches panics loads
RocksDB only if its job uses it."""

from __future__ import annotations


def is_panic(error: BaseException) -> bool:
    """Whether an exception is the panic of a library made with pyo3."""
    return any(kind.__name__ == "PanicException" and kind.__module__ == "pyo3_runtime" for kind in type(error).__mro__)


def failure_of(error: BaseException) -> BaseException:
    """`error` if it is a failure of the work that raised it: an Exception or a panic. Raises it otherwise: an interrupt, an exit,
    the end of a generator."""
    if isinstance(error, Exception) or is_panic(error):
        return error
    raise error
