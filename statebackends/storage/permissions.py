"""Permissions of written files: state is readable by its owner, or by the directory's group; output follows the umask.

A state directory that executors share with a sidecar of another user has the set-group-id bit and all rights for the group
(`chgrp streaming state; chmod 2770 state`): every process that opens it sees this, and needs no setting. Modes are passed with each
call; the process's umask stays as it is, since an embedded coordinator runs in the user's program."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Permissions:
    """Modes of created files and folders."""

    folder: int
    file: int
    exact: bool = False
    """Set the modes exactly, ignoring the umask, which might take away the group's rights."""

    def make_folder(self, path: str) -> None:
        """Create a folder. Raises OSError as mkdir does; NotADirectoryError or PermissionError if another user of the group put
        something else in its place."""
        os.mkdir(path, self.folder & 0o777)
        if self.exact:
            self._share(path)

    def _share(self, path: str) -> None:
        """Set the mode by descriptor, and through no link: by name it would change what another user puts there in between."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "another user put a folder in its place", path)
            os.fchmod(descriptor, self.folder)
        finally:
            os.close(descriptor)

    def create_file(self, path: str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_EXCL) -> int:
        """Create a file and return its descriptor. Raises OSError as open does."""
        descriptor = os.open(path, flags | os.O_CLOEXEC, self.file)
        if self.exact:
            with contextlib.suppress(PermissionError):  # the file existed, and is another user's of the group
                os.fchmod(descriptor, self.file)
        return descriptor


PRIVATE = Permissions(0o700, 0o600)
"""State for its owner alone."""

SHARED = Permissions(0o2770, 0o660, exact=True)
"""State that a group shares."""

OUTPUT = Permissions(0o777, 0o666)
"""Output of sinks, for other programs."""

_SHARING = stat.S_ISGID | stat.S_IRWXG


def permissions_of(folder: str | os.PathLike[str]) -> Permissions:
    """Permissions of state in a folder: SHARED if it has the set-group-id bit and all rights for the group, else PRIVATE."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return PRIVATE
    return SHARED if stat.S_ISDIR(mode) and mode & _SHARING == _SHARING else PRIVATE
