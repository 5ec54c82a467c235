"""Master hooks of the tests, which run in processes of their own. What they are called for goes into the file of HOOK_LOG."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from holdfast.coordinator.hooks.hook import HookCheckpoint, MasterHook


def _log(line: str) -> None:
    path = os.environ.get("HOOK_LOG")
    if path:
        with Path(path).open("a") as file:
            file.write(f"{os.getpid()} {line}\n")


class Stateful(MasterHook):
    """Gives the number of the checkpoint, in version 2 of its format; it reads version 1, too."""

    version = 2
    reads = (1, 2)

    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        sys.stdout.write("what a hook prints is no answer\n")
        sys.stdout.flush()
        _log(f"trigger {checkpoint.checkpoint_id} {checkpoint.epoch}")
        return b"state of %d" % checkpoint.checkpoint_id

    def restore_checkpoint(self, checkpoint: HookCheckpoint, version: int, state: bytes | None) -> None:
        _log(f"restore {checkpoint.checkpoint_id} of {checkpoint.timestamp_ms}: {version} {state!r}")

    def reset(self, checkpoint: HookCheckpoint) -> None:
        _log(f"reset {checkpoint.checkpoint_id}")

    def close(self) -> None:
        _log("close")


class Stateless(Stateful):
    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        super().trigger_checkpoint(checkpoint)
        return None


class Raising(Stateful):
    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        raise ValueError("the ledger is closed")


class Hanging(Stateful):
    """Hangs, with a process of its own."""

    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
            _log(f"child {child.pid}")
            time.sleep(600)
        return None


class Leaving(Stateful):
    """Dies and leaves a process of its own behind."""

    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        _log(f"child {child.pid}")
        os._exit(7)


class Dying(Stateful):
    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        os._exit(7)


class Huge(Stateful):
    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        return bytes(1 << 20)


class Babbling(Stateful):
    """Writes what is no answer to every descriptor that it has."""

    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        for descriptor in range(3, 12):
            try:
                os.write(descriptor, b"\xff" * 64)
            except OSError:
                continue
        return b"never heard"


class NotBytes(Stateful):
    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        return "text"  # type: ignore[return-value]


class NoHook:
    pass
