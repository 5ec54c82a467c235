"""Who may read what is written: state is its owner's alone, or a group's that the directory names; output is as the umask says.

A state directory that executors share with a sidecar of another user is one with the set-group-id bit and all rights of the group
(`chgrp streaming state; chmod 2770 state`): every process that opens it sees that, and nothing has to be told to any. The modes are
given with each call: the process's umask is left alone, since an embedded coordinator runs in its user's program."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Permissions:
    """Modes of what is created."""

    folder: int
    file: int
    exact: bool = False
    """Whether the umask has no say: a group shares nothing that it takes away."""

    def make_folder(self, path: str) -> None:
        """Raises OSError as mkdir does, and NotADirectoryError or PermissionError where another of the group put something in the
        new folder's place."""
        os.mkdir(path, self.folder & 0o777)
        if self.exact:
            self._share(path)

    def _share(self, path: str) -> None:
        """By descriptor, through no link: by name it would change whatever one of the group puts there in between."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(descriptor).st_uid != os.geteuid():
                raise PermissionError(errno.EPERM, "another user put a folder in its place", path)
            os.fchmod(descriptor, self.folder)
        finally:
            os.close(descriptor)

    def create_file(self, path: str, flags: int = os.O_WRONLY | os.O_CREAT | os.O_EXCL) -> int:
        """A descriptor of a new file. Raises OSError as open does."""
        descriptor = os.open(path, flags | os.O_CLOEXEC, self.file)
        if self.exact:
            with contextlib.suppress(PermissionError):  # it was there before, and is another user's of the group
                os.fchmod(descriptor, self.file)
        return descriptor


PRIVATE = Permissions(0o700, 0o600)
"""State: of its owner alone."""

SHARED = Permissions(0o2770, 0o660, exact=True)
"""State that a group shares."""

OUTPUT = Permissions(0o777, 0o666)
"""What sinks write for other programs."""

_SHARING = stat.S_ISGID | stat.S_IRWXG


def permissions_of(folder: str | os.PathLike[str]) -> Permissions:
    """Of state below a folder: a group's if the folder is one that a group shares, else its owner's alone."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return PRIVATE
    return SHARED if stat.S_ISDIR(mode) and mode & _SHARING == _SHARING else PRIVATE
