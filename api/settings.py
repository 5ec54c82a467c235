"""Settings of the service and of its clients: the only reader of environment variables and flags.

It decides precedence (flag, environment, default) and bounds; it opens no socket and starts nothing."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.api.logs import FORMATS, LEVELS
from holdfast.api.tokens import check_cleartext, check_exposure, check_token, is_loopback, load_or_create_token, read_token
from holdfast.barriers.run_record import RunRecord, read_run_record
from holdfast.coordinator.config import DRILL_TIMEOUT_MS, check_drill_timeout
from holdfast.coordinator.standby.election import TAKEOVER_AFTER_MS, TAKEOVER_AFTER_S3_MS, ElectionConfig
from holdfast.operators.worker.leader_retrieval import split_urls
from holdfast.operators.worker.trust import read_authorities
from holdfast.statebackends.errors import InvalidConfigError
from holdfast.statebackends.layout import TOKEN_FILE
from holdfast.statebackends.storage import is_s3
from holdfast.statebackends.storage.directory import folder_of
from holdfast.statebackends.storage.permissions import PRIVATE
from holdfast.statebackends.storage.s3 import location_of, parse_location

if TYPE_CHECKING:
    from holdfast.coordinator.ownership.cost import Prices

DEFAULT_HOST = "127.0.0.1"

BODY_BYTES_MAX = 256 * 1024 * 1024
"""Bytes of one request body; an acknowledgement may carry the state of the memory backend."""

CONNECTIONS_MAX = 8_192
"""Open connections of all callers together; fewer where the limit of file descriptors is lower."""

CONNECTIONS_MIN = 16

REQUESTS_PER_S_MAX = 200
"""Requests a second of one issued token; the service's own has five times as many."""

KEEP_ALIVE_INTERVAL_MS = 2_000
"""Milliseconds between keep-alive lines of a command stream."""

STOP_TIMEOUT_MS = 10_000
"""Milliseconds that a stopping service gives to requests in flight."""

TRACES = ("off", "otlp")

_PREFIX = "HOLDFAST_"
_LIMITS = (
    "BODY_BYTES_MAX",
    "CONNECTIONS_MAX",
    "REQUESTS_PER_S_MAX",
    "KEEP_ALIVE_INTERVAL_MS",
    "STOP_TIMEOUT_MS",
    "TAKEOVER_AFTER_MS",
    "DRILL_TIMEOUT_MS",
)


class Tls(StrEnum):
    """Where a listener's certificate comes from."""

    OFF = "off"
    AUTO = "auto"
    """From the state directory's own authority."""
    FILES = "files"
    """From files of the user's."""


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
    tls: Tls = Tls.OFF
    tls_cert: Path | None = None
    """Of `Tls.FILES`, absolute: the certificate, followed by those between it and its authority."""
    tls_key: Path | None = None
    tls_ca: Path | None = None
    """Of `Tls.FILES`: certificates that clients of the state directory and workers trust; None: those of their system."""
    insecure_http: bool = False
    """Whether it may listen beyond loopback without TLS."""
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
    requests_per_s_max: int = REQUESTS_PER_S_MAX
    keep_alive_interval_ms: int = KEEP_ALIVE_INTERVAL_MS
    stop_timeout_ms: int = STOP_TIMEOUT_MS
    traces: str = "off"
    """One of TRACES."""
    webhooks: Path | None = None
    """File of webhooks, which get events; absolute."""
    ha: bool = False
    """One of several members on the state directory, of which one is active."""
    takeover_after_ms: int | None = None
    """Of a member: see `election.ElectionConfig`; None: 3 s, on S3 10 s."""
    drill_timeout_ms: int = DRILL_TIMEOUT_MS
    """A drill that takes longer is ended: 1,000 to 604,800,000."""
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
        for name in ("body_bytes_max", "connections_max", "requests_per_s_max", "keep_alive_interval_ms", "stop_timeout_ms"):
            if getattr(self, name) < least.get(name, 1):
                text = f"{name} must be at least {least.get(name, 1)}, got {getattr(self, name)}"
                raise InvalidConfigError(text, setting=name)
        words = (("log_level", self.log_level, LEVELS), ("log_format", self.log_format, FORMATS), ("traces", self.traces, TRACES))
        for name, chosen, known in words:
            if chosen is not None and chosen not in known:
                raise InvalidConfigError(f"{name} must be one of {', '.join(known)}, got {chosen!r}", setting=name)
        if self.takeover_after_ms is not None:
            ElectionConfig(self.takeover_after_ms).check()
        check_drill_timeout(self.drill_timeout_ms)
        if self.advertised_host is not None and not is_host(self.advertised_host):
            text = f"advertised_host must be the name or address of a host, without scheme or port, got {self.advertised_host!r}"
            raise InvalidConfigError(text, setting="advertised_host")
        check_exposure(self.host, self.token)
        check_cleartext(self.host, is_encrypted=self.is_encrypted, insecure_http=self.insecure_http)

    @property
    def is_encrypted(self) -> bool:
        return self.tls is not Tls.OFF

    @property
    def election(self) -> ElectionConfig:
        """Times of a member."""
        default = TAKEOVER_AFTER_S3_MS if self.state_url is not None else TAKEOVER_AFTER_MS
        return ElectionConfig(self.takeover_after_ms if self.takeover_after_ms is not None else default)


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Address and token of a client's coordinator."""

    url: str
    """One URL, or those of several members with commas between."""
    token: str | None
    authorities: str | None = None
    """Certificates that the client trusts, PEM; None: those of the system."""


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
    chosen = check_named(flag) if flag is not None else _text(environment, "STATE_DIR")
    if chosen is None:
        raise InvalidConfigError("no state directory: give --state-dir or HOLDFAST_STATE_DIR", setting="state_dir")
    path = local_folder(chosen, environment)
    try:
        path.mkdir(mode=PRIVATE.folder, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfigError(f"can't use the state directory {path}: {error}", setting="state_dir") from error
    return path, state_url(chosen)


def check_named(state_dir: str | Path) -> str:
    """A state directory that was given by flag. Raises InvalidConfigError for an empty one, as of a variable that is not set: the
    working directory, or the one of the environment, would stand for it."""
    if not str(state_dir).strip():
        raise InvalidConfigError("the state directory is empty: leave --state-dir out, or name one", setting="state_dir")
    return str(state_dir)


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
    tls: str | None = None,
    tls_cert: str | Path | None = None,
    tls_key: str | Path | None = None,
    tls_ca: str | Path | None = None,
    insecure_http: bool = False,
    takeover: bool = False,
    ha: bool = False,
    flink_ui: str | Path | None = None,
    webhooks: str | Path | None = None,
    traces: str | None = None,
    prices: str | Path | None = None,
    log_level: str | None = None,
    log_format: str | None = None,
) -> ServerSettings:
    """Settings of a service from flags and environment, checked; draws the state directory's token if none is given."""
    directory, remote = state_directory(state_dir, environment)
    secret, secret_file = _server_token(environment, directory, token, token_file, no_token=no_token)
    listening = host or _text(environment, "HOST") or DEFAULT_HOST
    price_file = _file(prices or _text(environment, "PRICES"))
    settings = ServerSettings(
        state_dir=directory,
        host=listening,
        port=port if port is not None else _integer(environment, "PORT"),
        advertised_host=advertised_host or _text(environment, "ADVERTISED_HOST"),
        token=secret,
        token_file=secret_file,
        **_tls(environment, listening, (tls, tls_cert, tls_key, tls_ca), insecure_http=insecure_http),
        takeover=takeover,
        ha=ha,
        state_url=remote,
        prices=read_prices(price_file) if price_file is not None else None,
        flink_ui=_file(flink_ui or _text(environment, "FLINK_UI")),
        webhooks=_file(webhooks or _text(environment, "WEBHOOKS")),
        traces=_lower(traces or _text(environment, "TRACES")) or "off",
        snapshot_dirs=_snapshot_dirs(environment),
        log_level=_lower(log_level or _text(environment, "LOG_LEVEL")),
        log_format=_lower(log_format or _text(environment, "LOG_FORMAT")),
        **_limits(environment),
    )
    settings.check()
    return settings


def _limits(environment: Mapping[str, str]) -> dict[str, Any]:
    """Those that only the environment sets, by field."""
    found = {name.lower(): _integer(environment, name) for name in _LIMITS}
    return {name: value for name, value in found.items() if value is not None}


_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def is_host(text: str) -> bool:
    """Whether it can stand for the host of a URL: an address of IPv4 or IPv6 (also in brackets), or a name."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        return len(text) <= 253 and all(map(_HOST_LABEL.fullmatch, labels)) and not labels[-1].isdecimal()
    # A zone (`fe80::1%eth0`) means something on this machine alone.
    return "%" not in bare and (bare == text or address.version == 6)


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


def _tls(
    environment: Mapping[str, str],
    host: str,
    named: tuple[str | None, str | Path | None, str | Path | None, str | Path | None],
    *,
    insecure_http: bool,
) -> dict[str, Any]:
    """What serves TLS: the files that are named, else what was chosen, else the directory's own authority beyond loopback. Raises
    InvalidConfigError for what contradicts itself."""
    is_insecure = insecure_http or _flag(environment, "INSECURE_HTTP")
    texts = (
        _lower(named[0] or _text(environment, "TLS")),
        *(_file(each or _text(environment, name)) for each, name in zip(named[1:], ("TLS_CERT", "TLS_KEY", "TLS_CA"), strict=True)),
    )
    chosen, certificate, key, authorities = texts
    if chosen is not None and chosen not in (Tls.OFF, Tls.AUTO):
        raise InvalidConfigError(
            f"--tls is auto or off, got {chosen!r}; files are given by --tls-cert and --tls-key", setting="tls"
        )
    if (certificate is None) != (key is None):
        raise InvalidConfigError("--tls-cert and --tls-key belong together: give both", setting="tls_cert")
    if certificate is not None and chosen is not None:
        raise InvalidConfigError(f"--tls {chosen} and --tls-cert exclude each other", setting="tls")
    if authorities is not None and certificate is None:
        raise InvalidConfigError("--tls-ca is for --tls-cert: --tls auto has an authority of its own", setting="tls_ca")
    if certificate is not None:
        return {"tls": Tls.FILES, "tls_cert": certificate, "tls_key": key, "tls_ca": authorities, "insecure_http": is_insecure}
    default = Tls.OFF if is_insecure or is_loopback(host) else Tls.AUTO
    return {"tls": Tls(chosen) if chosen is not None else default, "insecure_http": is_insecure}


def _flag(environment: Mapping[str, str], name: str) -> bool:
    text = (_text(environment, name) or "0").lower()
    if text not in ("0", "1", "false", "true"):
        raise InvalidConfigError(f"{_PREFIX}{name} is {text!r}, must be 1 or 0", setting=_PREFIX + name)
    return text in ("1", "true")


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
    ca: str | Path | None = None,
) -> ClientSettings:
    """Address by URL, else as the coordinator wrote it into its state directory.

    Raises InvalidConfigError if neither is given, NeverServedError if no coordinator was ever served on the state directory."""
    given = _given_token(environment, token, token_file)
    named = check_named(state_dir) if state_dir is not None else _text(environment, "STATE_DIR")
    directory = local_folder(named, environment) if named is not None else None
    chosen = url or (None if state_dir else _text(environment, "URL"))
    if chosen is None:
        if directory is None:
            raise InvalidConfigError(
                "which coordinator? give --url or --state-dir, or set HOLDFAST_URL or HOLDFAST_STATE_DIR", setting="url"
            )
        chosen = _recorded(directory, named).url
    authorities = _authorities(environment, ca, directory)
    if given is not None:
        return ClientSettings(check_urls(chosen), given[0], authorities)
    return ClientSettings(check_urls(chosen), _recorded_token(directory) if directory is not None else None, authorities)


def _authorities(environment: Mapping[str, str], ca: str | Path | None, directory: Path | None) -> str | None:
    """Certificates that were named, else those that the directory's coordinator named. Raises InvalidConfigError."""
    named = _file(ca or _text(environment, "CA"))
    if named is not None:
        return read_authorities(named)
    record = read_run_record(directory) if directory is not None else None
    return read_authorities(record.ca_file) if record is not None and record.ca_file is not None else None


def named_state_directory(environment: Mapping[str, str], *, url: str | None, state_dir: str | Path | None) -> str | None:
    """State directory that a client named: by flag, or by the environment where no URL overrides it. Raises InvalidConfigError."""
    if state_dir is not None:
        return check_named(state_dir)
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


def check_urls(urls: str) -> str:
    """As `check_url`, for one URL or those of several members with commas between."""
    return ",".join(map(check_url, split_urls(urls))) or check_url(urls)


def check_url(url: str) -> str:
    """The URL without a trailing slash or `/v1`. Raises InvalidConfigError unless it is http(s)."""
    if not url.startswith(("http://", "https://")):
        raise InvalidConfigError(f"{url!r} is no http:// or https:// URL", setting="url")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
