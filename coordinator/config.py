"""Settings of a coordinator process, validated once. Settings of jobs are `holdfast.barriers.jobgraph.JobConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.statebackends.errors import InvalidConfigError


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Times in ms; every limit has its unit in its name or is a count."""

    state_directory: str
    """Directory or URL that every worker sees too."""
    url: str = ""
    """Where this coordinator is reached; written into leader records."""
    storage_threads: int = 8
    """Threads that decide, claim and prepare, shared by all jobs."""
    recovery_threads: int = 8
    """Threads that lead jobs on after a start, each one job at a time."""
    cleanup_threads: int = 2
    """Threads that delete; deletions never hold up a decision."""
    inbox_events_max: int = 10_000
    """Events that may wait for one job's thread; a caller beyond that waits its turn."""
    call_timeout_ms: int = 30_000
    """How long a call from outside waits for its job's thread."""
    jobs_max: int = 1_000
    """Jobs in memory, ended ones included; the longest ended one is forgotten first."""
    seed: int | None = None
    """Of nonces, session ids and first checkpoint delays; None: drawn from the system."""

    def check(self) -> None:
        """Raise InvalidConfigError naming the first setting out of bounds."""
        if not self.state_directory.strip():
            raise InvalidConfigError("state_directory is empty", setting="state_directory")
        for name in ("storage_threads", "recovery_threads", "cleanup_threads", "inbox_events_max", "call_timeout_ms", "jobs_max"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"{name} must be at least 1, got {getattr(self, name)}", setting=name)
