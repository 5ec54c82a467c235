"""The interface of master hooks, which their authors implement: `hf.MasterHook`.

A hook lets a system outside take part in a job's checkpoints: it is asked once for each checkpoint, before any task hears of it,
and what it gives is stored with the checkpoint. It runs in a process of its own beside the coordinator. Source: Flink,
MasterTriggerRestoreHook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HookCheckpoint:
    """The checkpoint that a call is about."""

    job_id: str
    epoch: int
    """Of the leader that asks. A system outside should refuse what comes with a lower one than it has seen."""
    checkpoint_id: int
    """0: there is none, the job starts empty."""
    timestamp_ms: int = 0
    """Of the checkpoint's trigger, ms since the epoch, also with a restore; 0: the job starts empty, or the process closes."""


class MasterHook(ABC):
    """One master hook. Its class, or a function without arguments that makes it, is an entry point of `holdfast.master_hooks`,
    whose name is the hook's id.

    Calls come one at a time. The process may end and be started anew between any two of them, for one without an answer in
    `master_hook_timeout_ms` is killed, and a new leader has processes of its own: what must last belongs outside, or into the
    state. A trigger may thus come to a hook that was neither restored nor reset in its process. Its checkpoint may still be
    aborted."""

    version: int = 1
    """Of the format of the states that `trigger_checkpoint` gives; at least 0."""

    reads: tuple[int, ...] | None = None
    """Versions that `restore_checkpoint` can read; None: `version` alone."""

    @abstractmethod
    def trigger_checkpoint(self, checkpoint: HookCheckpoint) -> bytes | None:
        """Take part in a checkpoint. Returns the state to store with it, at most 256 KiB; None for none.

        An error aborts the checkpoint."""

    @abstractmethod
    def restore_checkpoint(self, checkpoint: HookCheckpoint, version: int, state: bytes | None) -> None:
        """The job goes back to a checkpoint; no task runs yet. `state`: what this hook gave for it, in the format `version`; None
        (with version 0): nothing.

        An error keeps the job from starting; it is tried again a few times. So the call may repeat."""

    def reset(self, checkpoint: HookCheckpoint) -> None:
        """The job starts empty; no task runs yet. Called in place of `restore_checkpoint`."""
        return

    def close(self) -> None:
        """The process is about to end with its job, or the job goes on under another leader. Not called where it is killed."""
        return
