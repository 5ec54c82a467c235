"""Folders as people write them: a path, or a `file:///` URL; what is neither, and what no system takes, is refused by name."""

from __future__ import annotations

import os
from urllib.parse import unquote

from holdfast.statebackends.errors import InvalidConfigError


def folder_of(location: str) -> str:
    """The folder that a path or a `file:///` URL names. Raises InvalidConfigError."""
    scheme, mark, rest = location.partition("://")
    if not mark:
        return check_folder(location)
    if scheme != "file":
        raise InvalidConfigError(
            f"storage scheme {scheme!r} is not supported: use a path, file:/// or s3://bucket/prefix", url=location
        )
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidConfigError(f"{location!r} names a host: use file:/// and an absolute path", url=location)
    if "?" in path or "#" in path:  # a URL's path ends there: a folder of another name would be taken
        raise InvalidConfigError(f"{location!r}: in a URL the name of a folder has %3F for '?' and %23 for '#'", url=location)
    return check_folder(f"/{unquote(path)}")


def check_folder(path: str) -> str:
    """The path. Raises InvalidConfigError for one that is empty, or that no system takes."""
    if not path:
        raise InvalidConfigError("the location of a folder is empty", path=path)
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError as error:
        raise InvalidConfigError(f"{path!r} is no path: it is no text", path=path) from error
    if b"\0" in encoded:
        raise InvalidConfigError(f"{path!r} is no path: it holds a null character", path=path)
    return path
