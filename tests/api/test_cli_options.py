"""Options that commands share: typer sees each of them, and the command gets one record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from holdfast.api.cli.connections import ANYWHERE, Connection
from holdfast.api.cli.options import grouped


@dataclass(frozen=True, slots=True)
class Sized:
    size: Annotated[int, typer.Option("--size", min=1, help="How much.")] = 3
    name: Annotated[str | None, typer.Option("--name")] = None


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()

    @app.command()
    @grouped
    def show(what: Annotated[str, typer.Argument()], sized: Sized, connection: Connection = ANYWHERE, loud: bool = False) -> None:
        typer.echo(f"{what} {sized.size} {sized.name} {connection.url} {loud}")

    done = CliRunner().invoke(app, list(arguments))
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["it"], "it 3 None None False"),
        (["it", "--size", "7", "--name", "n", "--url", "http://x", "--loud"], "it 7 n http://x True"),
    ],
)
def test_a_command_gets_the_records(arguments: list[str], shown: str) -> None:
    assert run(*arguments) == (0, f"{shown}\n")


def test_each_option_is_judged_and_shown_as_a_parameter_would_be() -> None:
    code, shown = run("it", "--size", "0")
    assert code == 2
    assert "--size" in shown
    code, shown = run("--help")
    assert code == 0
    assert all(option in shown for option in ("--size", "--name", "--url", "--token-file", "--ca", "--state-dir", "--loud"))
    assert "--sized" not in shown
