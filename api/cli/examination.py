"""`holdfast doctor`: what to look at, by flags and environment, and the report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from holdfast.api.cli import console
from holdfast.api.doctor.examination import Examined, examine
from holdfast.api.doctor.findings import Verdict, exit_code
from holdfast.api.settings import ClientSettings, NeverServedError, client_settings, named_state_directory
from holdfast.statebackends.errors import InvalidConfigError

_WORDS = {Verdict.OK: "ok", Verdict.SKIPPED: "-", Verdict.WARNING: "WARNING", Verdict.FAULT: "FAULT"}


def show_examination(
    environment: Mapping[str, str],
    *,
    state_dir: str | None,
    url: str | None,
    token_file: Path | None,
    ca: Path | None,
    tls: tuple[Path | None, Path | None, Path | None],
    spark_conf: Path | None,
    asks_spark: bool,
    as_json: bool,
) -> int:
    """Print the report; returns the exit code."""
    directory = named_state_directory(environment, url=None, state_dir=state_dir)
    if directory is not None and "://" not in directory:
        directory = str(Path(directory).expanduser().absolute())
    client = _client(environment, url, token_file, state_dir, ca)
    certificate, key, authority = tls
    what = Examined(
        state_directory=directory,
        url=client.url if client is not None else None,
        token=client.token if client is not None else None,
        authorities=client.authorities if client is not None else None,
        certificate=certificate,
        key=key,
        authority=authority,
        spark_conf=spark_conf,
        asks_spark=asks_spark,
    )
    findings = examine(what, environment)
    if as_json:
        console.show_json(msgspec.to_builtins(findings))
        return exit_code(findings)
    for finding in findings:
        console.show_line(f"{_WORDS[finding.verdict]:<8} {finding.check:<20} {finding.text}")
        if finding.fix:
            console.show_line(f"{'':<8} {'':<20} fix: {finding.fix}")
    return exit_code(findings)


def _client(
    environment: Mapping[str, str], url: str | None, token_file: Path | None, state_dir: str | None, ca: Path | None
) -> ClientSettings | None:
    """The coordinator that is named, or that served the state directory last; None: there is none to ask."""
    try:
        return client_settings(environment, url=url, token_file=token_file, state_dir=state_dir, ca=ca)
    except NeverServedError:
        return None
    except InvalidConfigError as error:
        if url is None and error.fields.get("setting") == "url":
            return None
        raise
