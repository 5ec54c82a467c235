"""Many encoded tuples read at once, field by field: the inverse of joining each row's encoded fields."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from holdfast.statebackends.errors import CorruptStateError


class NestedRows:
    """Encoded tuples as one buffer, with the position in each row of the field to read next."""

    def __init__(self, encoded: Sequence[bytes]) -> None:
        self._joined = b"".join(encoded)
        self._bytes = np.frombuffer(self._joined, np.uint8)
        self._stops = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        self._next = np.concatenate([[0], self._stops[:-1]]) if len(encoded) else self._stops
        self._ends: npt.NDArray[np.int64] | None = None

    def skip_tag(self, tag: int) -> None:
        """Check and pass the tag of each row's next field (or of the tuple). Raises CorruptStateError."""
        if (self._next >= self._stops).any() or (self._bytes[self._next] != tag).any():
            raise self.corrupt()
        self._next = self._next + 1

    def fixed(self, width: int) -> npt.NDArray[np.uint8]:
        """Pass a body of `width` bytes in each row. Raises CorruptStateError."""
        start = self._next
        self._next = start + width
        if (self._next > self._stops).any():
            raise self.corrupt()
        bodies: npt.NDArray[np.uint8] = self._bytes[start[:, None] + np.arange(width)]
        return bodies

    def varying(self) -> list[bytes]:
        """Pass a body that ends at the next 00 that no FF follows. Raises CorruptStateError."""
        if self._ends is None:
            zero = np.flatnonzero(self._bytes == 0)
            escaped = self._bytes[np.minimum(zero + 1, len(self._bytes) - 1)] == 0xFF
            self._ends = zero[~escaped]
        found = np.searchsorted(self._ends, self._next)
        if (found >= len(self._ends)).any():
            raise self.corrupt()
        starts, stops = self._next.tolist(), self._ends[found]
        self._next = stops + 1
        if (self._next > self._stops).any():
            raise self.corrupt()
        joined = self._joined
        bodies = [joined[start:stop] for start, stop in zip(starts, stops.tolist(), strict=True)]
        return [body.replace(b"\0\xff", b"\0") for body in bodies] if b"\0\xff" in joined else bodies

    def finish(self) -> None:
        """Every row must have been read to its end. Raises CorruptStateError."""
        if (self._next != self._stops).any():
            raise self.corrupt()

    def corrupt(self) -> CorruptStateError:
        return CorruptStateError(f"{self._joined[:60]!r} ... are not keys of the declared type", reason="key encoding")
