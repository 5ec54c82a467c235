"""Options that several commands share, declared once: a command takes them as one record, and typer sees each of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of each dataclass that it takes in place of that parameter. Fields are annotated as parameters
    are, and have a default each; a default of the parameter itself is only for Python, which wants one behind another."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {
        each.name: each.annotation
        for each in signature.parameters.values()
        if isinstance(each.annotation, type) and is_dataclass(each.annotation)
    }

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    parameters = [
        shown
        for each in signature.parameters.values()
        for shown in (_parameters(groups[each.name]) if each.name in groups else (each,))
    ]
    expanded.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    return expanded


def _parameters(group: Any) -> Iterator[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        yield inspect.Parameter(
            field.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=field.default, annotation=hints[field.name]
        )
