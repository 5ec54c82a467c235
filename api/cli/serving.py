"""Options of `holdfast serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import typer

from holdfast.api.cli.connections import StateDir, TokenFile
from holdfast.api.settings import ServerSettings, server_settings


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """As they are given; what is left out is for the environment to say."""

    state_dir: StateDir = None
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on; 127.0.0.1 if left out.")] = None
    port: Annotated[
        int | None, typer.Option("--port", help="Port; if left out, the one of the last start, or a free one.", min=0, max=65_535)
    ] = None
    advertised_host: Annotated[str | None, typer.Option("--advertised-host", help="Host in the URL for drivers and workers.")] = (
        None
    )
    token_file: TokenFile = None
    no_token: Annotated[bool, typer.Option("--no-token", help="Let every local user in; on loopback only.")] = False
    tls: Annotated[
        Literal["auto", "off"] | None,
        typer.Option(
            "--tls",
            help="auto: a certificate from an authority of the state directory's own, the default beyond loopback; "
            "off: clear text. [env: HOLDFAST_TLS]",
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option("--tls-cert", help="Your certificate, PEM; read again when it changes. [env: HOLDFAST_TLS_CERT]"),
    ] = None
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its key, PEM. [env: HOLDFAST_TLS_KEY]")] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca", help="What clients of the state directory trust, PEM; their system's if left out. [env: HOLDFAST_TLS_CA]"
        ),
    ] = None
    insecure_http: Annotated[
        bool,
        typer.Option(
            "--insecure-http",
            help="Allow clear text beyond loopback: whoever is on the way can read tokens. [env: HOLDFAST_INSECURE_HTTP]",
        ),
    ] = False
    takeover: Annotated[bool, typer.Option("--takeover", help="Lead even if another coordinator seems to run here.")] = False
    ha: Annotated[
        bool, typer.Option("--ha", help="One of several members on the state directory: one leads, the others stand by.")
    ] = False
    flink_ui: Annotated[
        Path | None,
        typer.Option("--flink-ui", help="Jar of Flink (flink-dist, flink-runtime-web): its UI is served below /flink/."),
    ] = None
    webhooks: Annotated[
        Path | None, typer.Option("--webhooks", help="File of webhooks, which get events. [env: HOLDFAST_WEBHOOKS]")
    ] = None
    traces: Annotated[
        str | None, typer.Option("--traces", help="otlp: spans to an OpenTelemetry collector, as OTEL_... says; off if left out.")
    ] = None
    prices: Annotated[
        Path | None, typer.Option("--prices", help="Price file, TOML or JSON, for what jobs cost. [env: HOLDFAST_PRICES]")
    ] = None
    log_level: Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error; info if left out.")] = None
    log_format: Annotated[str | None, typer.Option("--log-format", help="text or json; text if left out.")] = None

    def settings(self, environment: Mapping[str, str]) -> ServerSettings:
        """Raises InvalidConfigError."""
        return server_settings(environment, **{each.name: getattr(self, each.name) for each in fields(self)})
