"""A bound on the time that a connection of ours takes in all, whatever its peer sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from urllib3.connection import HTTPConnection


@contextlib.contextmanager
def cutoff(connection: HTTPConnection, after_s: float) -> Iterator[threading.Event]:
    """End a connection behind the block, and some time after its beginning: no byte makes that later. The event is set then; look
    at it behind `connect`, too: a name may take as long, and until then there is nothing to cut."""
    late = threading.Event()

    def cut() -> None:
        late.set()
        if (sock := connection.sock) is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(after_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()
        connection.close()
