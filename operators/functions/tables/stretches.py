"""Time to live of columnar rows: each is in the namespace of the stretch of processing time in which it was written.

A stretch is one TTL long, and called by its first moment, ms. So no row expires in the stretch in which it was written, two
stretches hold all that has not expired, and a namespace goes as a whole. Whether a row of another stretch has expired is told by
its own stamp, also when the TTL was changed at a restore or the clock went back."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.statebackends.state import ColumnarState, OperatorListStateDescriptor, Redistribution

TTLS = OperatorListStateDescriptor("ttl", Redistribution.UNION)
"""The TTLs, ms, 8 bytes each, with which rows of the state were written."""


class Stretches:
    """The namespaces of one state."""

    def __init__(self, state: ColumnarState, ttl_ms: int, stored: Sequence[bytes], now_ms: int) -> None:
        """`stored`: entries of TTLS."""
        self._state = state
        self._ttl_ms = ttl_ms
        self._ttls_ms = {int.from_bytes(entry, "big") for entry in stored}
        self._older = set(state.namespaces() if self._ttls_ms - {ttl_ms} else ())
        """Namespaces of another length: they end at the restore."""
        self._opened_ms = now_ms

    def at(self, now_ms: int) -> int:
        """The namespace to write to."""
        self.forget(now_ms)
        self._ttls_ms.add(self._ttl_ms)
        return now_ms - now_ms % self._ttl_ms

    def others(self, namespace: int) -> list[int]:
        """Namespaces that may hold what has not expired, but for this one."""
        return [other for other in self._state.namespaces() if other != namespace]

    def forget(self, now_ms: int) -> None:
        """Drop the namespaces in which all has expired."""
        for namespace in self._state.namespaces():
            end_ms = namespace + self._ttl_ms
            if namespace in self._older:
                end_ms = max(end_ms, self._opened_ms + 1)
            if end_ms <= now_ms - self._ttl_ms:
                self._state.remove(namespace)
                self._older.discard(namespace)
        if not self._older:
            self._ttls_ms &= {self._ttl_ms}

    def entries(self) -> list[bytes]:
        """Of TTLS, as they are now."""
        return [ttl_ms.to_bytes(8, "big") for ttl_ms in sorted(self._ttls_ms)]
