"""SHELL: Flink's own UI, from the folder `web/` of a jar that the user has (flink-dist, flink-runtime-web).

A path is looked up in the jar's index and nowhere else: no file of this machine can be named. Nothing of the jar is run here."""

from __future__ import annotations

import contextlib
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from holdfast.api.errors import FlinkUiError
from holdfast.statebackends.errors import StorageUnavailableError

FILES_MAX = 5_000
FILE_BYTES_MAX = 32 * 1024 * 1024
"""Of one file, unpacked."""
FILES_BYTES_MAX = 256 * 1024 * 1024
"""Of all files, unpacked."""
KEPT_BYTES_MAX = 32 * 1024 * 1024
"""Of files that are kept unpacked: a page that is loaded again costs no unpacking."""

FOLDER = "web/"
INDEX = "index.html"

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".gif": "image/gif",
    ".html": "text/html; charset=utf-8",
    ".ico": "image/x-icon",
    ".jpg": "image/jpeg",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".map": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".ttf": "font/ttf",
    ".txt": "text/plain; charset=utf-8",
    ".woff": "font/woff",
    ".woff2": "font/woff2",
    ".xml": "application/xml",
}
_OTHER = "application/octet-stream"
_ENCRYPTED = 0x1
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


@dataclass(frozen=True, slots=True)
class WebFile:
    """One file of the UI."""

    name: str
    media_type: str
    tag: str
    """Of its content."""


class WebInterface:
    """The files of one jar, which stays open. Thread-safe."""

    def __init__(self, jar: Path) -> None:
        """Raises FlinkUiError (path) for what is no jar with a UI, or one that is too large."""
        self._jar = jar
        self._lock = threading.Lock()
        self._unpacked: OrderedDict[str, bytes] = OrderedDict()
        """By name, that which was asked for longest ago first."""
        self._kept_bytes = 0
        try:
            self._archive = zipfile.ZipFile(jar)
        except (OSError, zipfile.BadZipFile, ValueError) as error:
            raise FlinkUiError(f"--flink-ui: {jar} can't be read as a jar: {error}", path=str(jar)) from error
        try:
            self._entries = dict(self._checked())
        except BaseException:
            self._archive.close()
            raise

    def _checked(self) -> Iterator[tuple[str, zipfile.ZipInfo]]:
        entries = [entry for entry in self._archive.infolist() if entry.filename.startswith(FOLDER) and not entry.is_dir()]
        names = {entry.filename.removeprefix(FOLDER) for entry in entries}
        if INDEX not in names:
            raise self._refusal(f"has no {FOLDER}{INDEX}: give the jar flink-dist or flink-runtime-web of Flink")
        if len(entries) > FILES_MAX or sum(entry.file_size for entry in entries) > FILES_BYTES_MAX:
            raise self._refusal(f"has more below {FOLDER} than {FILES_MAX} files or {FILES_BYTES_MAX} bytes")
        for entry in entries:
            if entry.file_size > FILE_BYTES_MAX:
                raise self._refusal(f"has a file of {entry.file_size} bytes, more than {FILE_BYTES_MAX}: {entry.filename[:200]!r}")
            if entry.flag_bits & _ENCRYPTED or entry.compress_type not in _PACKED:
                raise self._refusal(f"has a file that is encrypted, or packed in a way that jars are not: {entry.filename[:200]!r}")
            yield entry.filename.removeprefix(FOLDER), entry

    def _refusal(self, problem: str) -> FlinkUiError:
        return FlinkUiError(f"--flink-ui: {self._jar} {problem}", path=str(self._jar))

    def find(self, name: str) -> WebFile | None:
        """A file by its path below `web/`; empty: the page."""
        entry = self._entries.get(name or INDEX)
        if entry is None:
            return None
        media_type = _TYPES.get(PurePosixPath(entry.filename).suffix.lower(), _OTHER)
        return WebFile(name or INDEX, media_type, f'"{entry.CRC:08x}-{entry.file_size:x}"')

    def read(self, file: WebFile) -> bytes:
        """Its content, unpacked once while there is room. Raises StorageUnavailableError if the jar was changed meanwhile."""
        with self._lock:
            known = self._unpacked.get(file.name)
            if known is not None:
                self._unpacked.move_to_end(file.name)
                return known
        content = self._unpack(file)
        with self._lock:
            self._keep(file.name, content)
        return content

    def _keep(self, name: str, content: bytes) -> None:
        if len(content) > KEPT_BYTES_MAX or name in self._unpacked:
            return
        self._unpacked[name] = content
        self._kept_bytes += len(content)
        while self._kept_bytes > KEPT_BYTES_MAX:
            _, oldest = self._unpacked.popitem(last=False)
            self._kept_bytes -= len(oldest)

    def _unpack(self, file: WebFile) -> bytes:
        entry = self._entries[file.name]
        try:
            with self._archive.open(entry) as stream:
                content = stream.read(entry.file_size)  # with a size, or what unpacks to more would be unpacked first
            if len(content) != entry.file_size:
                raise EOFError(f"{entry.filename} ends early")
            return content
        except (OSError, zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError) as error:
            raise StorageUnavailableError(f"{self._jar} of --flink-ui can't be read any more: {error}") from error

    def close(self) -> None:
        self._archive.close()


def check_web_interface(jar: Path) -> None:
    """Raise FlinkUiError unless the jar has a UI that can be served."""
    with contextlib.closing(WebInterface(jar)):
        pass
