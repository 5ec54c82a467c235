"""What one must do before acting on a file that somebody else may have died over: make sure that its name stays.

On a directory a name can be seen before it is durable. Who wrote it was not told of success then; whoever finds it and goes on
from there has to finish the job, or a power loss takes back what others have acted on."""

from __future__ import annotations

from statebackends.storage.operations import Flow, PutIfAbsent, ReadFile


def make_durable(path: str) -> Flow[bytes]:
    """Content of a file, which is durable from now on. Raises ObjectMissingError."""
    content: bytes = yield ReadFile(path)
    yield PutIfAbsent(path, content)  # it exists: this makes its name durable, and writes nothing
    return content
