"""How many files and sockets a process may hold: the limit of descriptors, raised where that is ours to do, and what is left of it.

A worker's database needs many, and connections of strangers to its data port must not take those that checkpoints need.
asyncio stops accepting for a second when descriptors run out, and opening a file then fails: connections end below that limit."""

from __future__ import annotations

import resource

DESCRIPTORS_MAX = 65_536
"""The soft limit is raised no further: some libraries walk over all descriptors up to it."""

_KEPT = 256
"""For files, logs, the job's threads, and one batch of accepted sockets."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit as far as we may. Of our own process only: a user may need `select`, which ends at 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(DESCRIPTORS_MAX, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def sockets_allowed(wanted: int) -> int:
    """So many of `wanted` sockets as the soft limit leaves room for; at least 16."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = wanted if soft == resource.RLIM_INFINITY else soft - max(_KEPT, soft // 4)
    return max(16, min(wanted, room))
