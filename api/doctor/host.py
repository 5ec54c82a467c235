"""This host: versions, libraries, limits, memory, Java, and Spark's settings in a file. Nothing is started but `java -version`."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.api.doctor.findings import Finding, fault, ok, skipped, warning
from holdfast.api.version import VERSION
from holdfast.operators.spark.settings import check_settings
from holdfast.statebackends.errors import InvalidConfigError

PYTHON_MIN = (3, 11)
JAVA_MIN = 17
FILES_MIN = 8_192
"""Open files of a process: connections of a coordinator, and of a worker those of RocksDB and its peers."""
PROCESSES_MIN = 4_096
SHARED_MEMORY_MIN = 64 << 20
"""Bytes of /dev/shm: containers have 64 MiB unless told otherwise."""
JAVA_TIMEOUT_S = 15.0

_NATIVE = ("pyarrow", "numpy", "rocksdict", "zmq", "msgspec", "mmh3", "xxhash")
_TOLD = ("pyspark", "pyarrow", "rocksdict", "fastapi", "uvicorn", "boto3")


def versions() -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < PYTHON_MIN:
        yield fault("python", f"Python {python}", "use Python 3.11 or newer, the same on driver and executors")
    else:
        told = ", ".join(f"{name} {version}" for name in _TOLD if (version := _version(name)))
        yield ok("versions", f"holdfast {VERSION}, Python {python}, {told}")
    broken = [f"{name} ({problem})" for name in _NATIVE if (problem := _import_problem(name))]
    if broken:
        fix = "install it again for this Python and this processor: pip install --force-reinstall <package>"
        yield fault("libraries", f"can't be imported: {', '.join(broken)}", fix)
    else:
        yield ok("libraries", f"{len(_NATIVE)} native libraries can be imported")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _import_problem(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # a library for another processor fails in ways of its own
        return f"{type(error).__name__}: {str(error)[:100]}"
    return ""


def java(environment: Mapping[str, str]) -> Iterator[Finding]:
    home = environment.get("JAVA_HOME")
    command = str(Path(home) / "bin" / "java") if home else shutil.which("java") or ""
    fix = f"install a Java runtime {JAVA_MIN} or newer (Debian: openjdk-17-jre-headless), or point JAVA_HOME at one"
    if not command or not Path(command).exists():
        yield warning("java", "there is none here; a driver or an executor needs one, a coordinator does not", fix)
        return
    done = subprocess.run([command, "-version"], capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False)
    found = re.search(r'version "(\d+)', done.stderr + done.stdout)
    major = int(found[1]) if found else 0
    if major < JAVA_MIN:
        yield fault("java", f"{command} is version {major or 'unknown'}, and Spark 4 needs {JAVA_MIN}", fix)
    else:
        yield ok("java", f"version {major} ({command})")


def limits() -> Iterator[Finding]:
    yield from _limit("open files", resource.RLIMIT_NOFILE, FILES_MIN, "LimitNOFILE=65536 in the unit, or `ulimit -n 65536`")
    yield from _limit("processes", resource.RLIMIT_NPROC, PROCESSES_MIN, "TasksMax=, LimitNPROC=, or `ulimit -u`")
    yield from shared_memory(Path("/dev/shm"))


def _limit(name: str, kind: int, least: int, fix: str) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(kind)
    shown = "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    reachable = resource.RLIM_INFINITY if hard == resource.RLIM_INFINITY else hard
    if resource.RLIM_INFINITY in (soft, reachable) or max(soft, reachable) >= least:
        yield ok(name, f"{shown}, at most {'any number' if reachable == resource.RLIM_INFINITY else f'{reachable:,}'}")
    else:
        yield warning(name, f"{shown} at most {reachable:,}, and {least:,} are wanted", fix)


def shared_memory(folder: Path) -> Iterator[Finding]:
    if not folder.is_dir():
        yield skipped("shared memory", f"there is no {folder}")
        return
    size = shutil.disk_usage(folder).total
    if size < SHARED_MEMORY_MIN:
        text = f"{folder} has {size >> 20} MiB: Arrow, and Spark's Python workers, may fail to share memory"
        yield warning("shared memory", text, "docker run --shm-size=256m; in Kubernetes an emptyDir with medium: Memory")
    else:
        yield ok("shared memory", f"{folder} has {size >> 20} MiB")


def spark_settings(file: Path | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Of a `spark-defaults.conf`; by default the one that Spark would read."""
    chosen = file or _defaults(environment)
    if chosen is None:
        yield skipped("spark settings", "no spark-defaults.conf was found; name one with --spark-conf, or ask Spark with --spark")
        return
    try:
        settings = settings_of(chosen)
    except (OSError, UnicodeDecodeError) as error:
        yield fault("spark settings", f"{chosen} can't be read: {error}", "name a readable file with --spark-conf")
        return
    yield from judge_settings(settings, str(chosen))


def judge_settings(settings: Mapping[str, str], origin: str) -> Iterator[Finding]:
    try:
        warnings = check_settings(lambda name, default: settings.get(name, default))
    except InvalidConfigError as error:
        yield fault("spark settings", f"{origin}: {error.message}", f"change {error.fields.get('setting', 'it')} there")
        return
    for text in warnings:
        yield warning("spark settings", f"{origin}: {text}", "docs/cluster.md says what to set instead")
    if not warnings:
        yield ok("spark settings", f"{origin} has nothing that long-lived workers can't have")


def settings_of(file: Path) -> dict[str, str]:
    """Spark's properties in a file. Raises OSError, UnicodeDecodeError."""
    return read_settings(file.read_text("utf-8"))


def read_settings(text: str) -> dict[str, str]:
    """Spark's properties: name and value, separated by a space, `=` or `:`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        parts = re.split(r"\s*[=:\s]\s*", line.strip(), maxsplit=1)
        if parts[0] and not parts[0].startswith("#"):
            found[parts[0]] = parts[1] if len(parts) > 1 else ""
    return found


def _defaults(environment: Mapping[str, str]) -> Path | None:
    home = environment.get("SPARK_HOME")
    folders = [environment.get("SPARK_CONF_DIR"), os.path.join(home, "conf") if home else None]
    files = (Path(folder) / "spark-defaults.conf" for folder in folders if folder)
    return next((file for file in files if file.is_file()), None)
