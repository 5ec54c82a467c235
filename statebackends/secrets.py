"""Values that don't belong into a job graph, state, a log or an error: a job names the environment variable that holds one."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Never
from urllib.parse import unquote

from holdfast.statebackends.errors import InvalidConfigError

HIDDEN = "***"

HIDDEN_LENGTH_MIN = 4
"""Characters of what is hidden in every text of a process: anything shorter is part of other words."""

_RESOLVED_MAX = 1_000
_IN_URL = re.compile(r"^[a-zA-Z][\w+.-]*://[^/?#]*?:([^/?#]*)@")
_IN_OPTIONS = re.compile(r"(?:password|passwd|pwd|token|secret)\s*=\s*(?:'((?:\\.|[^'\\])*)'|([^\s;&']+))", re.IGNORECASE)

_SECRET_NAME = re.compile(
    r"secret|passw(or)?d|passphrase|sas[-_.]?(token|key)|connection[-_.]?string"
    r"|(^|[-_.])(pwd|token|key|credential|authorization)([-_.]base64)?$"
)
"""Of settings, in lower case. An access key *id*, and where a key or a token comes from, are no secrets."""
_WORD_BEGINS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_resolved: dict[str, None] = {}
"""Contents that this process has resolved, and passwords in them; the latest last."""
_changing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Secret:
    """The content of an environment variable, in the process that uses it: a worker's, for a password of a connector.

    A job carries the variable's name only. Set the variable where the workers run: on Spark `spark.executorEnv.<NAME>`, or the
    environment of the containers. It can't be put into a text (`f"{secret}"` raises TypeError): pass it as it is.

    Raises InvalidConfigError when the name is none of a variable."""

    variable: str

    def __post_init__(self) -> None:
        if not isinstance(self.variable, str) or not self.variable.isidentifier():
            # The name is not shown: who passes the password itself must not find it in a log.
            raise InvalidConfigError("hf.Secret takes the name of an environment variable, not its content", setting="variable")

    def __repr__(self) -> str:
        return f"Secret({self.variable!r})"

    def __format__(self, spec: str) -> Never:
        raise TypeError(f"{self!r} can't be put into a text: pass it as it is, its content is read where it is used")

    def resolve(self) -> str:
        """Its content. Call it where a client is made, and keep the result in the client only. Raises InvalidConfigError when the
        variable is not set in this process, or is empty."""
        content = os.environ.get(self.variable)
        if not content:
            raise InvalidConfigError(
                f"environment variable {self.variable} is not set where it is used: set it for the workers "
                f"(spark.executorEnv.{self.variable})",
                setting=self.variable,
            )
        _remember(content)
        return content


def resolve(value: str | Secret) -> str:
    """A setting's text, whether it is a secret or not."""
    return value.resolve() if isinstance(value, Secret) else value


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret: a password, a token, a key. In any spelling: `accountKey`, `ACCOUNT_KEY`."""
    return _SECRET_NAME.search(_WORD_BEGINS.sub("_", name).lower()) is not None


def has_login(url: str) -> bool:
    """Whether a URL has a password in it."""
    found = _IN_URL.match(url)
    return found is not None and bool(found[1])


def check_settings(connector: str, setting: str, given: Mapping[str, str | Secret]) -> None:
    """Raises InvalidConfigError for plain text where a secret belongs, by the setting's name or as a URL's password; it shows no
    value. `setting`: the connector's argument that holds them."""
    for name, value in given.items():
        if isinstance(value, Secret) or not value:
            continue
        if not isinstance(name, str) or not isinstance(value, str):
            raise InvalidConfigError(f"{connector}: {setting} has texts and hf.Secret, and {name!r} is neither", setting=setting)
        if is_secret_name(name) or has_login(value):
            raise InvalidConfigError(
                f'{connector}: give {name} of {setting} as hf.Secret("VARIABLE"): it must be in no job graph and no log',
                setting=name,
            )


def hide(text: str, contents: Iterable[str]) -> str:
    """A client's message without secrets that it may repeat. `contents`: resolved ones, and parts of them such as a password."""
    for content in sorted(set(contents), key=len, reverse=True):
        if content:
            text = text.replace(content, HIDDEN)
    return text


def hide_resolved(text: str) -> str:
    """A text without secrets that this process has resolved: for whatever leaves it, such as a failure, which may quote a client's
    message. Those of less than four characters stay."""
    return hide(text, tuple(_resolved)) if _resolved else text


def _remember(content: str) -> None:
    parts = [part for part in (content, *_passwords(content)) if len(part) >= HIDDEN_LENGTH_MIN]
    if all(part in _resolved for part in parts):
        return
    with _changing:
        for part in parts:
            _resolved.pop(part, None)
            _resolved[part] = None
        while len(_resolved) > _RESOLVED_MAX:
            del _resolved[next(iter(_resolved))]


def _passwords(content: str) -> Iterator[str]:
    """Passwords in an address: clients quote them apart from it."""
    if (found := _IN_URL.match(content)) is not None:
        yield from (found[1], unquote(found[1]))
    for quoted, plain in _IN_OPTIONS.findall(content):
        yield from (re.sub(r"\\(.)", r"\1", quoted), quoted) if quoted else (plain, unquote(plain))
