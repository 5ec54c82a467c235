"""Batches on their way into a client: rows that it would refuse, and errors of its input, which it hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa


class CapturedBatches:
    """A reader for clients in native code, which turn an error of their input into text: keeps the error."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self._error: BaseException | None = None

    def reader(self, schema: pa.Schema) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(schema, self._guarded())

    def _guarded(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._batches
        except GeneratorExit:  # the client has failed by itself, and lets go of its input: that is no error of the input's
            raise
        except BaseException as error:
            self._error = error
            raise

    def raise_own(self) -> None:
        """Raise the error with which the input ended, if it did."""
        if self._error is not None:
            raise self._error


def first_refused(check: Callable[[pa.Array], str | None], values: pa.Array) -> tuple[int, str]:
    """The first value that a check refuses, and why: found by halves, since a check takes each value by itself."""
    begin, count = 0, len(values)
    while count > 1:
        half = count // 2
        if check(values.slice(begin, half)) is None:
            begin, count = begin + half, count - half
        else:
            count = half
    return begin, check(values.slice(begin, 1)) or ""


def shown_row(rows: pa.RecordBatch, row: int) -> str:
    """A row for an error's text, cut to 500 characters; also one with times that Python has no object for."""
    values = ", ".join(f"{name!r}: {_shown(column[row])}" for name, column in zip(rows.schema.names, rows.columns, strict=True))
    return f"{{{values}"[:499] + "}"


def _shown(value: pa.Scalar) -> str:
    try:
        return repr(value.as_py())
    except (ValueError, OverflowError):
        return repr(value.value) if hasattr(value, "value") else f"<{value.type}>"
