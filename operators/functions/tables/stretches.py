"""Time to live of columnar rows: each is in the namespace of the stretch of processing time in which it was written.

A namespace is called by the first moment of its stretch, ms, and goes as a whole once all that is in it has expired; whether a
single row has expired is told by its own stamp. Stretches are one TTL long, so that two or three of them hold all that has not
expired; only where the TTL was changed they are cut at the restore."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.statebackends.state import ColumnarState, OperatorListStateDescriptor, Redistribution

TTLS = OperatorListStateDescriptor("ttl", Redistribution.UNION)
"""One entry a subtask: the TTL with which it wrote last, ms, 8 bytes."""


class Stretches:
    """The namespaces of one state."""

    def __init__(self, state: ColumnarState, ttl_ms: int, stored: Sequence[bytes], now_ms: int) -> None:
        """`stored`: entries of TTLS."""
        self._state = state
        self._ttl_ms = ttl_ms
        self._ttls_ms = {int.from_bytes(entry, "big") for entry in stored}
        """With which the newest rows were written."""
        self._is_changed = bool(self._ttls_ms - {ttl_ms})
        self._opened_ms = now_ms

    def at(self, now_ms: int) -> int:
        """The namespace to write to."""
        self.forget(now_ms)
        self._ttls_ms = {self._ttl_ms}
        begun = self._opened_ms if self._is_changed else 0
        return max([begun, now_ms - now_ms % self._ttl_ms, *self._state.namespaces()[-1:]])

    def before(self, namespace: int) -> list[int]:
        """Older namespaces that may hold what has not expired."""
        return [other for other in self._state.namespaces() if other < namespace]

    def forget(self, now_ms: int) -> None:
        """Drop the namespaces in which all has expired."""
        found = self._state.namespaces()
        for namespace, following in zip(found, [*found[1:], None], strict=False):
            if following is None:  # its last row was written before this
                following = max(namespace + self._ttl_ms, self._opened_ms + 1 if self._is_changed else 0)
            if following <= now_ms - self._ttl_ms:
                self._state.remove(namespace)

    def entries(self) -> list[bytes]:
        """Of TTLS, as they are now."""
        return [ttl_ms.to_bytes(8, "big") for ttl_ms in sorted(self._ttls_ms)]
