"""A coordinator as a process (`holdfast serve`) or inside a driver: start, announce, serve, stop.

It decides the order of start and stop, and which files the next start finds; it knows no route and no job."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from holdfast.api.directory_guard import DirectoryGuard, OpenCoordinator, open_coordinator
from holdfast.api.events.webhook_file import read_webhooks
from holdfast.api.flink.web_interface import check_web_interface
from holdfast.api.logs import writing_log
from holdfast.api.server.member import standing_by
from holdfast.api.server.pauses import HeapSettler
from holdfast.api.server.server import RestServer, advertised_url, bind, describe_exposure
from holdfast.api.server.tls import ServedTls, served_tls
from holdfast.api.settings import ServerSettings
from holdfast.api.tls.live import LiveContext
from holdfast.barriers.descriptors import raise_descriptor_limit
from holdfast.barriers.run_record import RunRecord, write_run_record
from holdfast.coordinator.interface import Coordinator
from holdfast.statebackends.errors import InvariantError, StorageUnavailableError

log = logging.getLogger("holdfast.api")

START_TIMEOUT_S = 30.0
"""Seconds until an embedded coordinator must listen."""


@dataclass(frozen=True, slots=True)
class _Led:
    """A coordinator that leads once its bound socket listens."""

    service: Coordinator
    listener: socket.socket
    url: str
    guard: DirectoryGuard
    tls: ServedTls | None

    @property
    def live(self) -> LiveContext | None:
        return self.tls.live if self.tls is not None else None

    def announce(self, settings: ServerSettings) -> None:
        """Write its address for the next start, workers and the CLI."""
        token_file = None if settings.token_file is None else str(settings.token_file)
        port = int(self.listener.getsockname()[1])
        ca_file = str(self.tls.ca_file) if self.tls is not None and self.tls.ca_file is not None else None
        record = RunRecord(self.url, os.getpid(), socket.gethostname(), port, token_file, ca_file)
        write_run_record(settings.state_dir, record)
        self.guard.announced = record


@contextlib.contextmanager
def _leading(settings: ServerSettings, open_service: OpenCoordinator) -> Iterator[_Led]:
    """Guard the directory, bind, open; undone in reverse order. Raises CoordinatorRunningError, InvalidConfigError,
    FlinkUiError ..."""
    _check(settings)
    with contextlib.ExitStack() as undo:
        guard = undo.enter_context(DirectoryGuard(settings.state_dir, takeover=settings.takeover, location=settings.location))
        listener = undo.enter_context(bind(settings))
        url = advertised_url(settings, listener.getsockname()[1])
        tls = served_tls(settings, url)
        service = open_service(settings, url)
        undo.callback(service.close)
        undo.enter_context(guard.kept_for(service))
        yield _Led(service, listener, url, guard, tls)


def _logging(settings: ServerSettings, *, embedded: bool) -> contextlib.AbstractContextManager[None]:
    """Log of a coordinator; inside a driver, which configures its own logging, only if a setting requests it."""
    if embedded and settings.log_level is None and settings.log_format is None:
        return contextlib.nullcontext()
    secrets: tuple[str, ...] = (settings.token,) if settings.token is not None else ()
    if settings.webhooks is not None:
        secrets += tuple(text for webhook in read_webhooks(settings.webhooks) for text in webhook.secret_texts)
    return writing_log(settings.log_level or "info", settings.log_format or "text", secrets=secrets, everything=not embedded)


def serve(
    settings: ServerSettings,
    *,
    announce: Callable[[str], None],
    as_json: bool = False,
    open_service: OpenCoordinator = open_coordinator,
) -> None:
    """Run a coordinator in this process until SIGINT or SIGTERM. `announce` gets one line once it listens."""
    raise_descriptor_limit()
    if settings.ha:
        _serve_member(settings, announce, open_service, as_json=as_json)
        return
    with _logging(settings, embedded=False), _leading(settings, open_service) as led:

        def started() -> None:
            HeapSettler().begin()
            led.service.lead()
            led.announce(settings)
            announce(_welcome(settings, led.url, as_json=as_json))

        RestServer(led.service, settings, on_started=started, tls=led.live).run(sockets=[led.listener])


def _serve_member(
    settings: ServerSettings, announce: Callable[[str], None], open_service: OpenCoordinator, *, as_json: bool
) -> None:
    _check(settings)
    with _logging(settings, embedded=False), standing_by(settings, open_service) as member:

        def started() -> None:
            HeapSettler().begin()
            member.service.lead()
            announce(_welcome(settings, member.url, as_json=as_json))

        server = RestServer(member.service, settings, on_started=started, tls=member.tls, membership=member.membership)
        server.run(sockets=[member.listener])


def _check(settings: ServerSettings) -> None:
    settings.check()
    if settings.flink_ui is not None:
        check_web_interface(settings.flink_ui)


def _welcome(settings: ServerSettings, url: str, *, as_json: bool) -> str:
    token_file = None if settings.token_file is None else str(settings.token_file)
    if as_json:
        facts = {"url": url, "pid": os.getpid(), "state_dir": settings.location, "token_file": token_file}
        return json.dumps(facts)
    token = f", token in {token_file}" if token_file else ""
    return f"coordinator of {settings.location} at {url} (open to {describe_exposure(settings)}{token})"


class EmbeddedCoordinator:
    """A coordinator in a thread of this process; as durable and as replaceable as `holdfast serve`."""

    def __init__(self, settings: ServerSettings, *, open_service: OpenCoordinator = open_coordinator) -> None:
        self._settings = settings
        self._open_service = open_service
        self._undo = contextlib.ExitStack()
        self._server: RestServer | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._guard: DirectoryGuard | None = None
        self._tls: ServedTls | None = None
        self._url = ""

    @property
    def url(self) -> str:
        """Raises InvariantError before `start`."""
        if not self._url:
            raise InvariantError("the embedded coordinator was not started")
        return self._url

    @property
    def token(self) -> str | None:
        return self._settings.token

    @property
    def authorities(self) -> str | None:
        """Certificates that its clients trust, PEM; None: those of their system, or there is no TLS."""
        return self._tls.authorities if self._tls is not None else None

    @property
    def holds_lock(self) -> bool:
        """Whether it holds the lock of the state directory; False before `start`, and once fenced."""
        return self._guard is not None and self._guard.is_held

    def start(self) -> None:
        """Listen and lead; returns when requests are answered. Raises like `serve`."""
        if self._thread is not None:
            raise InvariantError("the embedded coordinator was started before")
        with contextlib.ExitStack() as undo:
            undo.enter_context(_logging(self._settings, embedded=True))
            led = undo.enter_context(_leading(self._settings, self._open_service))
            self._undo = undo.pop_all()
        self._url, self._guard, self._tls = led.url, led.guard, led.tls
        listening = threading.Event()

        def started() -> None:
            led.service.lead()
            listening.set()

        self._server = RestServer(led.service, self._settings, on_started=started, tls=led.live)
        self._thread = threading.Thread(
            target=self._run, args=(self._server, led.listener, listening), name="holdfast-rest", daemon=True
        )
        self._thread.start()
        try:
            if not listening.wait(START_TIMEOUT_S) or self._failure is not None:
                raise StorageUnavailableError(f"the embedded coordinator did not start: {self._failure or 'timeout'}")
            led.announce(self._settings)
        except BaseException:
            self.stop()
            raise

    def _run(self, server: RestServer, listener: socket.socket, listening: threading.Event) -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:
            self._failure = error
            log.exception("the embedded coordinator ended")
        finally:
            listening.set()

    def stop(self) -> None:
        """Stop leading and listening without ending any job. Idempotent."""
        server, self._server = self._server, None
        if server is None or self._thread is None:
            return
        server.should_exit = True
        self._thread.join()
        self._undo.close()

    def __enter__(self) -> EmbeddedCoordinator:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
