"""CORE: which records of a totally ordered input a subtask reads next, and how that position survives a rescale.

Record i belongs to stripe i mod S. A subtask owns whole stripes and merges them by i, so that its own records keep the
total order whatever the parallelism is or was. It knows of no file and no rate."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.statebackends.decoding import UNDECODABLE, decode_msgpack
from holdfast.statebackends.errors import CorruptStateError, InvalidConfigError

Indices = npt.NDArray[np.int64]


class StripePosition(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a striped source's split state; says all that a reader needs, whoever gets it."""

    version: int
    stripe_count: int
    stripe: int
    next_index: int
    """Global index of the stripe's first record that was not read: congruent to `stripe` mod `stripe_count`."""
    input: str = ""
    """Storage-relative path of the input's manifest; empty for a generator."""


def encode_position(position: StripePosition) -> bytes:
    """msgpack of one entry."""
    return msgspec.msgpack.encode(position)


def decode_positions(entries: Iterable[bytes], operator: str) -> list[StripePosition]:
    """Entries as restored. Raises CorruptStateError when one can't be read or they are of different inputs."""
    try:
        positions = [decode_msgpack(entry, StripePosition) for entry in entries]
    except UNDECODABLE as error:
        raise CorruptStateError(
            f"source {operator}: a position can't be read: {error}", operator=operator, reason=str(error)
        ) from error
    for position in positions:
        if position.version != 1:
            reason = f"position format {position.version} is not known to this version (1)"
            raise CorruptStateError(f"source {operator}: {reason}", operator=operator, reason=reason)
    if len({(position.stripe_count, position.input) for position in positions}) > 1:
        reason = "positions of different inputs are mixed"
        raise CorruptStateError(f"source {operator}: {reason}", operator=operator, reason=reason)
    return positions


def stripe_count_for(parallelism: int, max_parallelism: int) -> int:
    """The largest multiple of `parallelism` up to `max_parallelism`: subtask s then reads exactly the records i = s mod p."""
    return parallelism * max(1, max_parallelism // parallelism)


class StripeCursor:
    """The next records of the stripes that one subtask owns, in global order, out of `total` records."""

    def __init__(self, stripe_count: int, owned: Iterable[int], total: int, *, next_indices: dict[int, int] | None = None) -> None:
        """`next_indices`: stripe -> first unread index, for restored stripes; a stripe without one starts at its first record."""
        self.stripe_count = stripe_count
        self._owned: Indices = np.array(sorted(owned), dtype=np.int64)
        if len(self._owned) and not 0 <= self._owned[0] <= self._owned[-1] < stripe_count:
            raise InvalidConfigError(f"stripes must be in 0..{stripe_count - 1}, got {self._owned.tolist()}")
        self._total = total
        starts = next_indices or {}
        self._next: Indices = np.array([starts.get(int(stripe), int(stripe)) for stripe in self._owned], dtype=np.int64)
        self._cursor = int(self._next.min()) if len(self._next) else total
        # From here on every stripe is read; before it some stripes are ahead, as they were read further elsewhere.
        self._even_from = int(self._next.max()) if len(self._next) else total

    def set_total(self, total: int) -> None:
        """Records in the input, once known; nothing may have been taken before."""
        self._total = total

    def peek(self) -> int | None:
        """Global index of the next record, or None at the end."""
        indices = self._window(1, self._total)
        if len(indices) == 0:
            self._cursor = self._total
            return None
        self._cursor = int(indices[0])
        return self._cursor

    def take(self, count: int, stop: int | None = None) -> Indices:
        """Up to `count` next indices, ascending, all below `stop`; the cursor moves behind them. Empty at `stop` or the end."""
        limit = self._total if stop is None else min(stop, self._total)
        indices = self._window(count, limit)
        self._cursor = int(indices[-1]) + 1 if len(indices) else max(self._cursor, limit)
        return indices

    def _window(self, count: int, limit: int) -> Indices:
        """The next `count` owned indices in [cursor, limit), without moving."""
        if count <= 0 or self._cursor >= limit or not len(self._owned):
            return np.empty(0, dtype=np.int64)
        step, owned = self.stripe_count, self._owned
        first = self._cursor // step
        while first * step < limit:
            rounds = min(count // len(owned) + 2, (limit - 1) // step + 1 - first)
            indices = (np.arange(first, first + rounds, dtype=np.int64)[:, None] * step + owned).ravel()
            # Only the first and the last round can stick out.
            low, high = np.searchsorted(indices, (self._cursor, limit))
            indices = indices[low:high]
            if self._cursor < self._even_from:
                indices = indices[indices >= np.tile(self._next, rounds)[low:high]]
            if len(indices):
                return indices[:count]
            first += rounds
        return np.empty(0, dtype=np.int64)

    def positions(self) -> list[tuple[int, int]]:
        """(stripe, first unread index) of every owned stripe, whether it has ended or not."""
        behind = (self._owned - self._cursor) % self.stripe_count
        unread = np.maximum(self._next, self._cursor + behind)
        return list(zip(self._owned.tolist(), unread.tolist(), strict=True))
