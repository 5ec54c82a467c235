"""Which checks are made, for what was named."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.api.doctor import executors, host, network, storage
from holdfast.api.doctor.findings import Check, Finding, run_checks, skipped
from holdfast.statebackends.errors import InvalidConfigError


@dataclass(frozen=True, slots=True)
class Examined:
    """What to look at; None: it was not named."""

    state_directory: str | None = None
    url: str | None = None
    """One, or those of several members with commas between."""
    token: str | None = None
    authorities: str | None = None
    """Certificates to trust, PEM."""
    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    spark_conf: Path | None = None
    asks_spark: bool = False


def _ask_spark(what: Examined) -> Iterator[Finding]:
    try:
        settings = {} if what.spark_conf is None else host.settings_of(what.spark_conf)
    except (OSError, UnicodeDecodeError):  # its own check says so
        yield skipped("executors", f"Spark is not started: {what.spark_conf} can't be read")
        return
    directory = what.state_directory
    if directory is not None and not storage.is_there(directory):
        yield skipped("shared directory", f"{directory} does not exist here: executors are not asked about it")
        directory = None
    yield from executors.ask_spark(what.url, directory, settings)


def examine(what: Examined, environment: Mapping[str, str]) -> list[Finding]:
    """Raises InvalidConfigError for a certificate without its key."""
    if (what.certificate is None) != (what.key is None):
        raise InvalidConfigError("a certificate is checked with its key: give --tls-cert and --tls-key", setting="tls-key")
    checks = [
        Check("versions", host.versions, "install holdfast again in a new environment"),
        Check("java", functools.partial(host.java, environment), "the Java of JAVA_HOME does not start: install another"),
        Check("limits", host.limits, "look at `ulimit -a`"),
        Check("spark settings", functools.partial(host.spark_settings, what.spark_conf, environment), "look at the file"),
    ]
    if what.asks_spark and what.spark_conf is None:
        del checks[-1]  # Spark itself says what it has read
    left_out: list[Finding] = []
    if what.state_directory is not None:
        look = functools.partial(storage.storage_of, what.state_directory, secrets.token_hex(8))
        checks.append(Check("storage", look, "the file system hangs, or the store is not reached: look at mounts and routes"))
    else:
        left_out.append(skipped("storage", "no state directory was named: --state-dir"))
    if what.url is not None:
        for url in what.url.split(","):
            look = functools.partial(network.coordinator, url, what.token, what.authorities)
            checks.append(Check("coordinator", look, "look at the network between here and there"))
    else:
        left_out.append(skipped("coordinator", "none was named, and none has served the state directory: --url"))
    if what.authorities is not None or what.state_directory is not None:
        look = functools.partial(network.authority, what.authorities, what.state_directory)
        checks.append(Check("authority", look, "look at the file with openssl x509 -noout -dates"))
    if what.certificate is not None and what.key is not None:
        look = functools.partial(network.certificates, what.certificate, what.key, what.authority)
        checks.append(Check("certificate", look, "look at the files with openssl"))
    here = run_checks(checks)
    if what.asks_spark:
        look = functools.partial(_ask_spark, what)
        found = run_checks([Check("executors", look, "Spark does not start, or has no free slots")], executors.TIMEOUT_S)
    else:
        found = [skipped("executors", "Spark is started only with --spark: what executors reach is not known")]
    return [*here, *left_out, *found]
