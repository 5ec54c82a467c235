"""SHELL: hosts as network namespaces of this machine, each with one interface on a switch, which is a bridge in a namespace of its
own: the machine's own network is left as it is.

What a process starts with `inside` has, beside the host's network, process ids of its own and the host's own disk at one path: no
other host reaches its unix sockets or kills its processes, as workers of one machine do.

A link between two hosts is cut where a host looks up the other's hardware address: it is given one that nobody has, and the frames
are lost on the way, without an answer, as behind a switch that died. That works between any two hosts of one bridge, in one
direction too, on connections that stand, and needs neither a packet filter nor modules of the kernel."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.cluster.plan import HOSTS, Lost

NOBODY = "02:00:00:00:00:fe"
"""Hardware address that no host has. The hosts' own end in their numbers."""
PREFIX = "holdfast"
NAME = re.compile(rf"{PREFIX}-(\d+)-[a-z0-9-]+")
"""Of a namespace: the number is the pid of the process that made it."""
INTERFACE = "eth0"
SWITCH = "switch"
KILL_WAIT_S = 20.0

Run = Callable[..., str]
"""Run a command, given as its words; returns its output. Raises NetworkError."""


class NetworkError(Exception):
    """The system refused a command, named in the text."""


class UnsupportedError(Exception):
    """This machine can't have the cluster, and why."""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def check_supported(command: Run = run) -> None:
    """Raise UnsupportedError without root, without `ip`, or where namespaces may not be made. Leaves nothing behind."""
    if os.geteuid() != 0:
        raise UnsupportedError("making network namespaces needs root: sudo make cluster")
    for name, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("mount", "mount")):
        if shutil.which(name) is None:
            raise UnsupportedError(f"`{name}` is needed (Debian, Ubuntu: apt-get install {package}), and was not found")
    name = f"{PREFIX}-{os.getpid()}-try"
    try:
        command("ip", "netns", "add", name)
        try:
            command("ip", "-n", name, "link", "add", "name", SWITCH, "type", "bridge")
            command("ip", "-n", name, "link", "add", "name", "port1", "type", "veth", "peer", "name", "port2")
            command("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "true")
        finally:
            command("ip", "netns", "del", name)
    except NetworkError as error:
        raise UnsupportedError(f"this machine gives no network namespaces with bridges: {error}") from error


@dataclass
class Network:
    """The hosts and their switch; a context manager. Its end kills all processes in it, and deletes it."""

    folder: Path
    """Has the hosts' disks; of nobody else."""
    hosts: tuple[str, ...] = HOSTS
    command: Run = run
    owner: int = field(default_factory=os.getpid)

    @property
    def disk(self) -> Path:
        """Path of a host's own disk, on that host."""
        return self.folder / "disk"

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def namespace(self, host: str) -> str:
        return f"{PREFIX}-{self.owner}-{host}"

    def inside(self, host: str, *command: str) -> list[str]:
        """The command that runs one on a host. When its process is killed, those that it started are, too."""
        network = ("ip", "netns", "exec", self.namespace(host))
        machine = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        disks = (str(self.folder / "disks" / host), str(self.disk))
        return [*network, *machine, "sh", "-c", 'mount --bind "$1" "$2" && shift 2 && exec "$@"', "sh", *disks, *command]

    def __enter__(self) -> Self:
        sweep(self.command)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _make(self) -> None:
        self.disk.mkdir(parents=True, exist_ok=True)
        for host in self.hosts:
            (self.folder / "disks" / host / "tmp").mkdir(parents=True, exist_ok=True)
        switch = self.namespace(SWITCH)
        self.command("ip", "netns", "add", switch)
        self.command("ip", "-n", switch, "link", "add", "name", SWITCH, "type", "bridge")
        self.command("ip", "-n", switch, "link", "set", SWITCH, "up")
        for number, host in enumerate(self.hosts, 1):
            name = self.namespace(host)
            self.command("ip", "netns", "add", name)
            pair = ("type", "veth", "peer", "name", f"port{number}", "netns", switch)
            self.command("ip", "-n", name, "link", "add", "name", INTERFACE, "address", f"02:00:00:00:00:{number:02x}", *pair)
            self.command("ip", "-n", switch, "link", "set", f"port{number}", "master", SWITCH, "up")
            self.command("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", INTERFACE)
            self.command("ip", "-n", name, "link", "set", INTERFACE, "up")
            self.command("ip", "-n", name, "link", "set", "lo", "up")

    def cut(self, first: str, second: str, lost: Lost) -> None:
        for sender, receiver in _directions(first, second, lost):
            place = ("lladdr", NOBODY, "dev", INTERFACE, "nud", "permanent")
            self.command("ip", "-n", self.namespace(sender), "neigh", "replace", self.address(receiver), *place)

    def heal(self, first: str, second: str, lost: Lost) -> None:
        for sender, receiver in _directions(first, second, lost):
            self.command("ip", "-n", self.namespace(sender), "neigh", "del", self.address(receiver), "dev", INTERFACE)

    def close(self) -> None:
        """Kill what runs on the hosts, and delete all. Idempotent; goes on behind errors, the first of which it raises."""
        delete([self.namespace(host) for host in (*self.hosts, SWITCH)], self.command)


def _directions(first: str, second: str, lost: Lost) -> list[tuple[str, str]]:
    out, back = (first, second), (second, first)
    return {Lost.BOTH: [out, back], Lost.OUT: [out], Lost.BACK: [back]}[lost]


def existing(command: Run = run) -> list[str]:
    """Names of this machine's namespaces."""
    return [line.split()[0] for line in command("ip", "netns", "list").splitlines() if line.strip()]


def sweep(command: Run = run) -> None:
    """Delete what runs left that were killed: namespaces whose maker is no more."""
    named = [(name, NAME.fullmatch(name)) for name in existing(command)]
    delete([name for name, match in named if match is not None and not os.path.exists(f"/proc/{match[1]}")], command)


def delete(names: Iterable[str], command: Run = run) -> None:
    """Delete those of the namespaces that exist, with the processes in them."""
    there = set(existing(command))
    failed: NetworkError | None = None
    for name in (name for name in names if name in there):
        try:
            _kill_all(name, command)
            command("ip", "netns", "del", name)  # its interfaces, and their peers on the switch, go with it
        except NetworkError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _kill_all(name: str, command: Run) -> None:
    """Kill processes until there are none: one that is killed may just have started another."""
    deadline = time.monotonic() + KILL_WAIT_S
    while pids := [int(pid) for pid in command("ip", "netns", "pids", name).split()]:
        if time.monotonic() > deadline:
            raise NetworkError(f"processes {pids} in {name} do not end")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
