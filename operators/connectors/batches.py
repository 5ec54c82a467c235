"""Batches on their way into a client: errors of its input, which it hides."""

from __future__ import annotations

from collections.abc import Iterator

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
