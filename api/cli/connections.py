"""Where a command finds its coordinator, or the state directory in place of it, and the job that it is about."""

from __future__ import annotations

import functools
import os
import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from holdfast.api.cli import console
from holdfast.api.client import RestClient
from holdfast.api.errors import ConnectionLostError
from holdfast.api.members.known import known_members, known_members_in
from holdfast.api.settings import NeverServedError, client_settings, local_folder, named_state_directory
from holdfast.coordinator.ha.records import derive_job_id, is_job_id
from holdfast.statebackends.errors import AccessDeniedError, HoldfastError, InvalidConfigError, NotFoundError
from holdfast.statebackends.storage import is_s3
from holdfast.statebackends.storage.locations import open_storage

LOOK_S = 10.0
"""For a look at the members in a bucket: its library is loaded within it."""

TERMINAL_STATES = frozenset({"FINISHED", "CANCELED", "FAILED"})

Url = Annotated[str | None, typer.Option("--url", help="Coordinator's URL. [env: HOLDFAST_URL]")]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file", help="File that holds the bearer token. [env: HOLDFAST_TOKEN_FILE, HOLDFAST_TOKEN]", show_default=False
    ),
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        help="Certificates to trust, PEM; else what --state-dir says, or the system's. [env: HOLDFAST_CA]",
        show_default=False,
    ),
]
StateDir = Annotated[
    str | None,
    typer.Option(
        "--state-dir",
        help="State directory, a folder or s3://bucket/prefix; has its coordinator's address. [env: HOLDFAST_STATE_DIR]",
        show_default=False,
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Read the state directory itself, without a coordinator.")]


@dataclass(frozen=True, slots=True)
class Connection:
    """Options of a command that asks a coordinator."""

    url: Url = None
    token_file: TokenFile = None
    ca: Ca = None
    state_dir: StateDir = None

    def client(self) -> RestClient:
        """Client that gives up at the first lost connection, since a person waits."""
        settings = client_settings(os.environ, url=self.url, token_file=self.token_file, state_dir=self.state_dir, ca=self.ca)
        named = named_state_directory(os.environ, url=self.url, state_dir=self.state_dir)
        connect = functools.partial(RestClient, token=settings.token, authorities=settings.authorities, reconnect_timeout_s=0)
        if named is None:
            return connect(settings.url)
        if is_s3(named):
            return connect(settings.url, further=functools.partial(_members_elsewhere, named, settings.url))
        return connect(",".join((settings.url, *known_members(local_folder(named, os.environ), settings.url))))

    def reader(self, *, offline: bool) -> JobReader:
        """Client of the coordinator, or of the state directory itself where no coordinator answers; then a note on stderr says so.

        `offline`: read the state directory without asking. Raises ConnectionLostError where no state directory was named, and as
        `client`."""
        directory = named_state_directory(os.environ, url=None if offline else self.url, state_dir=self.state_dir)
        if offline and directory is None:
            raise InvalidConfigError("--offline reads a state directory: give --state-dir", setting="state_dir")
        if not offline:
            try:
                client = self.client()
                client.overview()
            except AccessDeniedError:
                return client  # it answers; a token of one job may not list all
            except ConnectionLostError as error:
                if directory is None:
                    hint = "To read what its state directory holds without it, give --state-dir"
                    raise ConnectionLostError(f"{error.message}. {hint}", **error.fields) from error
                why = error.message
            except NeverServedError as error:
                why = error.message
            else:
                return client
        from holdfast.api.cli.stored_jobs import StoredJobs  # imports libraries that no other command needs

        assert directory is not None
        stored = StoredJobs(directory)
        if not offline:
            console.show_note(f"{why}. What follows is what {stored.location} holds")
        return stored

    def labeller(self, *, offline: bool) -> Labeller:
        """Client of the coordinator, or with `offline` the state directory itself: only who says so changes it behind a
        coordinator."""
        if not offline:
            return self.client()
        reader = self.reader(offline=True)
        from holdfast.api.cli.stored_jobs import StoredJobs

        assert isinstance(reader, StoredJobs)
        return reader


ANYWHERE = Connection()
"""Of a command that was given none of these options: the environment says where."""


def _members_elsewhere(named: str, recorded: str) -> tuple[str, ...]:
    """Members of a state directory in a bucket; none if it does not tell within LOOK_S. It is asked once a coordinator does not
    answer: a library that takes a second to import, and a bucket that may be away as well, are not for every command."""
    found: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()

    def look() -> None:
        try:
            found.put(known_members_in(open_storage(named), recorded))
        except HoldfastError:
            found.put(())

    threading.Thread(target=look, name="holdfast-members", daemon=True).start()
    try:
        return found.get(timeout=LOOK_S)
    except queue.Empty:
        return ()


class JobReader(Protocol):
    """Queries of the reading commands, answered by a coordinator or from the state directory."""

    def jobs(self) -> list[dict[str, Any]]: ...

    def unreadable(self) -> list[dict[str, Any]]: ...

    def totals(self) -> dict[str, dict[str, Any]]: ...

    def checkpoints(self, job_id: str) -> dict[str, Any]: ...

    def history(
        self, job_id: str, *, after: str = "", kinds: Iterable[str] = (), limit: int = 100, newest: bool = False, before: str = ""
    ) -> dict[str, Any]: ...

    def labels(self, job_id: str) -> dict[str, Any]: ...

    def cost(self, job_id: str) -> dict[str, Any]: ...


class Labeller(JobReader, Protocol):
    """What changes labels."""

    def add_label(self, job_id: str, checkpoint_id: int, label: str) -> dict[str, Any]: ...

    def remove_label(self, job_id: str, label: str, checkpoint_id: int | None = None) -> list[dict[str, Any]]: ...


def resolve_job(client: JobReader, text: str) -> str:
    """Job id for an id, a unique beginning of one, or a name. Raises NotFoundError, InvalidConfigError, AccessDeniedError."""
    try:
        jobs = client.jobs()
    except AccessDeniedError as error:
        mine = error.fields.get("job")  # the token is for that job alone, and lists none
        if isinstance(mine, str) and (mine.startswith(text) or mine == derive_job_id(text)):
            return mine
        raise
    named = [job for job in jobs if job["name"] == text]
    live = [job for job in named if job["state"] not in TERMINAL_STATES]
    for found in ([job for job in jobs if job["jid"] == text], live, named, [job for job in jobs if job["jid"].startswith(text)]):
        if len(found) == 1:
            return str(found[0]["jid"])
        if found:
            ids = ", ".join(sorted(str(job["jid"]) for job in found)[:5])
            raise InvalidConfigError(f"{text!r} stands for {len(found)} jobs ({ids}): give a whole id", job=text)
    if is_job_id(text):
        return text  # another coordinator may lead and list it; this one answers by which
    raise NotFoundError(f"no job {text!r}: `holdfast jobs` lists them", job=text)
