"""Settings of a coordinator process, validated once. Settings of jobs: `holdfast.barriers.jobgraph.JobConfig`."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.statebackends.errors import InvalidConfigError

VIEW_INTERVAL_MS = 500

DRILL_TIMEOUT_MS = 3_600_000
DRILL_TIMEOUT_MS_MIN, DRILL_TIMEOUT_MS_MAX = 1_000, 7 * 24 * 3_600_000


def check_drill_timeout(timeout_ms: int) -> None:
    """Raise InvalidConfigError for a time out of bounds."""
    if not DRILL_TIMEOUT_MS_MIN <= timeout_ms <= DRILL_TIMEOUT_MS_MAX:
        text = f"drill_timeout_ms must be {DRILL_TIMEOUT_MS_MIN}..{DRILL_TIMEOUT_MS_MAX}, got {timeout_ms}"
        raise InvalidConfigError(text, setting="drill_timeout_ms")


@dataclass(frozen=True, slots=True)
class ServiceConfig:
    """Settings of one coordinator process. Times are in ms."""

    state_directory: str
    """Directory or URL that every worker sees, too."""
    url: str = ""
    """URL of this coordinator, written into leader records."""
    storage_threads: int = 8
    """Threads that write claims and decisions and prepare attempts, shared by all jobs. At least 1."""
    recovery_threads: int = 8
    """Threads that recover jobs after a start, one job each at a time. At least 1."""
    cleanup_threads: int = 2
    """Threads that delete; no decision waits for a deletion. At least 1."""
    history_threads: int = 2
    """Threads that write histories of jobs, which nothing waits for. At least 1."""
    inbox_events_max: int = 10_000
    """Events that may wait for one job's thread; further requests are refused, to be repeated. At least 1."""
    call_timeout_ms: int = 30_000
    """How long a call from outside waits for its job's thread. At least 1."""
    view_interval_ms: int = VIEW_INTERVAL_MS
    """Least time between two views of a job that GETs are answered from; 0: each has what holds now. At least 0."""
    history: bool = True
    """Record what happens to jobs in their directories."""
    drill_timeout_ms: int = DRILL_TIMEOUT_MS
    """A drill that takes longer is ended. At least 1,000, at most a week."""
    jobs_max: int = 1_000
    """Jobs in memory, ended ones included; the one that ended first is forgotten first. At least 1."""
    seed: int | None = None
    """Seed of nonces, session ids and first checkpoint delays; None: drawn from the operating system."""

    def check(self) -> None:
        """Raise InvalidConfigError naming the first setting out of bounds."""
        if not self.state_directory.strip():
            raise InvalidConfigError("state_directory is empty", setting="state_directory")
        threads = ("storage_threads", "recovery_threads", "cleanup_threads", "history_threads")
        for name in (*threads, "inbox_events_max", "call_timeout_ms", "jobs_max"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"{name} must be at least 1, got {getattr(self, name)}", setting=name)
        check_drill_timeout(self.drill_timeout_ms)
        if self.view_interval_ms < 0:
            text = f"view_interval_ms must be at least 0, got {self.view_interval_ms}"
            raise InvalidConfigError(text, setting="view_interval_ms")
