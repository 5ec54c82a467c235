"""Settings of the service and of its clients: the only reader of environment variables and flags.

It decides precedence (flag, environment, default) and bounds; it opens no socket and starts nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.api.logs import FORMATS, LEVELS
from holdfast.api.run_record import RunRecord, read_run_record
from holdfast.api.tokens import check_exposure, check_token, load_or_create_token, read_token
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.layout import TOKEN_FILE
from holdfast.statebackends.storage.directory import folder_of
from holdfast.statebackends.storage.permissions import PRIVATE
from holdfast.statebackends.storage.s3 import is_s3, location_of, parse_location

if TYPE_CHECKING:
    from holdfast.coordinator.ownership.cost import Prices

DEFAULT_HOST = "127.0.0.1"

BODY_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of one request body; an acknowledgement may carry the state of the memory backend."""

CONNECTIONS_MAX = 8_192
"""Open connections of all callers together; fewer where the limit of file descriptors is lower."""

CONNECTIONS_MIN = 16

KEEP_ALIVE_INTERVAL_MS = 2_000
"""Milliseconds between keep-alive lines of a command stream."""

STOP_TIMEOUT_MS = 10_000
"""Milliseconds that a stopping service gives to requests in flight."""

_PREFIX = "HOLDFAST_"


class NeverServedError(InvalidConfigError):
    """The state directory has no address of a coordinator: none was ever started there, or not on this machine."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings of `holdfast serve` and of the embedded coordinator."""

    state_dir: Path
    """Absolute. For a state directory on S3, the folder of this machine with its lock, token and last address."""
    host: str = DEFAULT_HOST
    """Address to listen on."""
    port: int | None = None
    """None: the port of the last coordinator on this state directory, or a free one. 0: a free one."""
    advertised_host: str | None = None
    """Host in the URL given to others; None: the host, or this machine's outward address for 0.0.0.0 and ::."""
    token: str | None = None
    """None: callers on loopback need none."""
    token_file: Path | None = None
    """File of the token, for the CLI; None if it came from elsewhere."""
    takeover: bool = False
    state_url: str | None = None
    """`s3://bucket/prefix` of a state directory there; None: the state directory is `state_dir`."""
    prices: Prices | None = None
    """Of what storage takes; None: costs are told without money."""
    flink_ui: Path | None = None
    """Jar of Flink whose UI is served below `/flink/`; absolute."""
    snapshot_dirs: tuple[str, ...] = ()
    """Further directories and URLs whose snapshots REST shows; those of the state directory are always shown."""
    body_bytes_max: int = BODY_BYTES_MAX
    connections_max: int = CONNECTIONS_MAX
    keep_alive_interval_ms: int = KEEP_ALIVE_INTERVAL_MS
    stop_timeout_ms: int = STOP_TIMEOUT_MS
    log_level: str | None = None
    """One of logs.LEVELS; None: info for `holdfast serve`, the driver's own logging for an embedded coordinator."""
    log_format: str | None = None
    """One of logs.FORMATS; None: text."""

    @property
    def location(self) -> str:
        """The state directory in the form that every worker uses."""
        return self.state_url or str(self.state_dir)

    def check(self) -> None:
        """Raise InvalidConfigError naming the first setting out of bounds."""
        if self.port is not None and not 0 <= self.port <= 65_535:
            raise InvalidConfigError(f"port must be 0..65535, got {self.port}", setting="port")
        least = {"connections_max": CONNECTIONS_MIN}
        for name in ("body_bytes_max", "connections_max", "keep_alive_interval_ms", "stop_timeout_ms"):
            if getattr(self, name) < least.get(name, 1):
                text = f"{name} must be at least {least.get(name, 1)}, got {getattr(self, name)}"
                raise InvalidConfigError(text, setting=name)
        for name, chosen, known in (("log_level", self.log_level, LEVELS), ("log_format", self.log_format, FORMATS)):
            if chosen is not None and chosen not in known:
                raise InvalidConfigError(f"{name} must be one of {', '.join(known)}, got {chosen!r}", setting=name)
        check_exposure(self.host, self.token)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Address and token of a client's coordinator."""

    url: str
    token: str | None


def _integer(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(_PREFIX + name)
    if text is None or not text.strip():
        return None
    try:
        return int(text)
    except ValueError as error:
        raise InvalidConfigError(f"{_PREFIX}{name} is {text!r}, must be a whole number", setting=_PREFIX + name) from error


def _text(environment: Mapping[str, str], name: str) -> str | None:
    return environment.get(_PREFIX + name, "").strip() or None


def state_directory(flag: str | Path | None, environment: Mapping[str, str]) -> tuple[Path, str | None]:
    """The state directory's folder on this machine, absolute, and its URL if it is elsewhere; the folder is created if missing.

    Raises InvalidConfigError if it is no folder or can't be created. S3 is not contacted yet."""
    chosen = flag or _text(environment, "STATE_DIR")
    if chosen is None:
        raise InvalidConfigError("no state directory: give --state-dir or HOLDFAST_STATE_DIR", setting="state_dir")
    path = local_folder(chosen, environment)
    try:
        path.mkdir(mode=PRIVATE.folder, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfigError(f"can't use the state directory {path}: {error}", setting="state_dir") from error
    return path, state_url(chosen)


def state_url(state_dir: str | Path) -> str | None:
    """URL of a state directory on S3, in normal form; None for a folder. Raises InvalidConfigError for a wrong one."""
    return location_of(*parse_location(str(state_dir))) if is_s3(str(state_dir)) else None


def local_folder(state_dir: str | Path, environment: Mapping[str, str]) -> Path:
    """Folder of a state directory on this machine: itself, or where lock, token and address of one on S3 are kept.

    The latter is below HOLDFAST_LOCAL_DIR, else the user's state folder (XDG). Raises InvalidConfigError."""
    url = state_url(state_dir)
    if url is None:
        return Path(os.path.expanduser(folder_of(str(state_dir)))).absolute()
    base = _text(environment, "LOCAL_DIR")
    if base is None:
        base = os.path.join(environment.get("XDG_STATE_HOME") or "~/.local/state", "holdfast")
    bucket, digest = url.split("/")[2], hashlib.sha256(url.encode()).hexdigest()[:12]
    return Path(os.path.expanduser(base)).absolute() / f"{bucket}-{digest}"


def server_settings(
    environment: Mapping[str, str],
    *,
    state_dir: str | Path | None = None,
    host: str | None = None,
    port: int | None = None,
    advertised_host: str | None = None,
    token: str | None = None,
    token_file: str | Path | None = None,
    no_token: bool = False,
    takeover: bool = False,
    flink_ui: str | Path | None = None,
    prices: str | Path | None = None,
    log_level: str | None = None,
    log_format: str | None = None,
) -> ServerSettings:
    """Settings of a service from flags and environment, checked; draws the state directory's token if none is given."""
    directory, remote = state_directory(state_dir, environment)
    secret, secret_file = _server_token(environment, directory, token, token_file, no_token=no_token)
    numbers: dict[str, Any] = {
        name.lower(): value
        for name in ("BODY_BYTES_MAX", "CONNECTIONS_MAX", "KEEP_ALIVE_INTERVAL_MS", "STOP_TIMEOUT_MS")
        if (value := _integer(environment, name)) is not None
    }
    price_file = _file(prices or _text(environment, "PRICES"))
    settings = ServerSettings(
        state_dir=directory,
        host=host or _text(environment, "HOST") or DEFAULT_HOST,
        port=port if port is not None else _integer(environment, "PORT"),
        advertised_host=advertised_host or _text(environment, "ADVERTISED_HOST"),
        token=secret,
        token_file=secret_file,
        takeover=takeover,
        state_url=remote,
        prices=read_prices(price_file) if price_file is not None else None,
        flink_ui=_file(flink_ui or _text(environment, "FLINK_UI")),
        snapshot_dirs=_snapshot_dirs(environment),
        log_level=_lower(log_level or _text(environment, "LOG_LEVEL")),
        log_format=_lower(log_format or _text(environment, "LOG_FORMAT")),
        **numbers,
    )
    settings.check()
    return settings


def _lower(text: str | None) -> str | None:
    return text.lower() if text is not None else None


def _file(named: str | Path | None) -> Path | None:
    return Path(os.path.expanduser(named)).absolute() if named is not None else None


def read_prices(path: Path) -> Prices:
    """Raises InvalidConfigError naming the file."""
    from holdfast.coordinator.ownership.cost import PRICES_BYTES_MAX, decode_prices  # of no use to most programs

    try:
        with path.open("rb") as file:
            content = file.read(PRICES_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidConfigError(f"price file {path} can't be read: {error.strerror}", setting="prices", path=str(path)) from error
    return decode_prices(content, str(path))


def _snapshot_dirs(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Raises InvalidConfigError for one that is neither an absolute path nor on S3."""
    found = tuple(text.strip() for text in (_text(environment, "SNAPSHOT_DIRS") or "").split(",") if text.strip())
    for directory in found:
        if state_url(directory) is None and not directory.startswith("/"):
            name = _PREFIX + "SNAPSHOT_DIRS"
            raise InvalidConfigError(f"{name} names {directory!r}, must be absolute paths or s3:// URLs", setting=name)
    return found


def _server_token(
    environment: Mapping[str, str], directory: Path, token: str | None, token_file: str | Path | None, *, no_token: bool
) -> tuple[str | None, Path | None]:
    if no_token:
        if token is not None or token_file is not None:
            raise InvalidConfigError("--no-token and --token-file exclude each other", setting="token")
        return None, None
    found = _given_token(environment, token, token_file)
    return found if found is not None else (load_or_create_token(directory), directory / TOKEN_FILE)


def _given_token(
    environment: Mapping[str, str], token: str | None, token_file: str | Path | None
) -> tuple[str, Path | None] | None:
    """Token named by flag or environment, and its file; a flag of either form overrides the environment."""
    if token is not None:
        return check_token(token, origin="the token setting"), None
    if token_file is None and (text := _text(environment, "TOKEN")) is not None:
        return check_token(text, origin="HOLDFAST_TOKEN"), None
    file = token_file or _text(environment, "TOKEN_FILE")
    if file is None:
        return None
    path = Path(os.path.expanduser(file)).absolute()
    return read_token(path), path


def client_settings(
    environment: Mapping[str, str],
    *,
    url: str | None = None,
    token: str | None = None,
    token_file: str | Path | None = None,
    state_dir: str | Path | None = None,
) -> ClientSettings:
    """Address by URL, else as the coordinator wrote it into its state directory.

    Raises InvalidConfigError if neither is given, NeverServedError if no coordinator was ever served on the state directory."""
    given = _given_token(environment, token, token_file)
    named = state_dir or _text(environment, "STATE_DIR")
    directory = local_folder(named, environment) if named is not None else None
    chosen = url or (None if state_dir else _text(environment, "URL"))
    if chosen is None:
        if directory is None:
            raise InvalidConfigError(
                "which coordinator? give --url or --state-dir, or set HOLDFAST_URL or HOLDFAST_STATE_DIR", setting="url"
            )
        chosen = _recorded(directory, named).url
    if given is not None:
        return ClientSettings(check_url(chosen), given[0])
    return ClientSettings(check_url(chosen), _recorded_token(directory) if directory is not None else None)


def named_state_directory(environment: Mapping[str, str], *, url: str | None, state_dir: str | Path | None) -> str | None:
    """State directory that a client named: by flag, or by the environment where no URL overrides it."""
    if state_dir is not None:
        return str(state_dir)
    if url is not None or _text(environment, "URL") is not None:
        return None
    return _text(environment, "STATE_DIR")


def _recorded(directory: Path, named: str | Path | None) -> RunRecord:
    record = read_run_record(directory)
    if record is None:
        where = " on this machine; one elsewhere is reached with --url" if is_s3(str(named)) else ""
        message = f"no coordinator has served {named}{where}: start one with `holdfast serve`"
        raise NeverServedError(message, setting="state_dir")
    return record


def _recorded_token(directory: Path) -> str | None:
    record = read_run_record(directory)
    path = record.token_file if record is not None else None
    return read_token(Path(path)) if path is not None else None


def check_url(url: str) -> str:
    """The URL without a trailing slash or `/v1`. Raises InvalidConfigError unless it is http(s)."""
    if not url.startswith(("http://", "https://")):
        raise InvalidConfigError(f"{url!r} is no http:// or https:// URL", setting="url")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
