"""What one must do before acting on a file that somebody else may have died over: make sure that its name stays.

On a directory a name can be seen before it is durable. Who wrote it was not told of success then; whoever finds it and goes on
from there has to finish the job, or a power loss takes back what others have acted on."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.statebackends.storage.flows import read_whole
from holdfast.statebackends.storage.port import Flow, PutIfAbsent


def make_durable(path: str, read: Callable[[str], Flow[bytes]] = read_whole) -> Flow[bytes]:
    """Content of a file, as `read` gives it, which is durable from now on. Raises ObjectMissingError."""
    content = yield from read(path)
    yield PutIfAbsent(path, content)  # it exists: this makes its name durable, and writes nothing
    return content
