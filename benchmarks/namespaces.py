"""Hosts on a LAN of their own: network namespaces joined by a bridge, which nothing can leave; links of known width."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "gasloc-test"

_BURST_BYTES = 16 * 1024
_QUEUE_MS = 100


def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"network namespaces need the program '{program}' (iproute2)"
    return ""


class Lan:
    """A switch with hosts 10.77.0.1, 10.77.0.2, ...; a `with` block, after which all of it is gone.

    `network`: the first three numbers of their addresses. p2pd treats those of the public internet otherwise than
    private ones. Namespaces are named PREFIX-PID-HOST. Entering first removes those whose process was killed. Leaving
    kills what still runs inside. Raises `subprocess.CalledProcessError` where the kernel refuses; nothing is left then.
    """

    def __init__(self, hosts: int, *, prefix: str = PREFIX, network: str = "10.77.0") -> None:
        self._prefix = prefix
        self._stem = f"{prefix}-{os.getpid()}"
        self._hosts = range(1, hosts + 1)
        self._network = network

    def __enter__(self) -> Self:
        sweep(self._prefix)
        try:
            self._make(f"{self._stem}-switch")
            for bridge in ("lan", "apart"):
                self._ip("switch", f"link add {bridge} type bridge")
                self._ip("switch", f"link set {bridge} up")
            for number in self._hosts:
                host = str(number)
                self._make(f"{self._stem}-{host}")
                self._ip("switch", f"link add to{host} type veth peer name eth0 netns {self._stem}-{host}")
                self._ip("switch", f"link set to{host} master lan up")
                self._ip(host, f"addr add {self.ip(number)}/24 dev eth0")
                self._ip(host, "link set eth0 up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def ip(self, number: int) -> str:
        """A host's address on the LAN."""
        return f"{self._network}.{number}"

    def inside(self, number: int) -> list[str]:
        """What to write before a command so that a host executes it."""
        return ["ip", "netns", "exec", f"{self._stem}-{number}"]

    def shape(self, number: int, mbit_per_s: float) -> None:
        """Limits a host's link, each way, to so many 10^6 bits a second: a token bucket at both ends of its cable.

        May be called again at any time. Frames wait up to 100 ms in the bucket's queue; then they are dropped.
        """
        for host, device in ((str(number), "eth0"), ("switch", f"to{number}")):
            words = f"qdisc replace dev {device} root tbf rate {mbit_per_s * 1e6:.0f} burst {_BURST_BYTES}"
            _run("tc", "-n", f"{self._stem}-{host}", *words.split(), "latency", f"{_QUEUE_MS}ms")

    def cut(self, numbers: Collection[int]) -> None:
        """Parts these hosts from the others: they go on another bridge. No frame crosses until `heal`."""
        for number in numbers:
            self._ip("switch", f"link set to{number} master apart")

    def heal(self) -> None:
        """Ends every cut."""
        for number in self._hosts:
            self._ip("switch", f"link set to{number} master lan")

    def add_bridge(self, number: int) -> str:
        """Gives a host an interface as docker has one; returns its address."""
        self._ip(str(number), "link add docker0 type bridge")
        self._ip(str(number), "addr add 172.17.0.1/16 dev docker0")
        self._ip(str(number), "link set docker0 up")
        return "172.17.0.1"

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _ip(self, host: str, words: str) -> None:
        _run("ip", "-n", f"{self._stem}-{host}", *words.split())

    def _remove(self) -> None:
        for name in _names():
            if name.startswith(f"{self._stem}-"):
                _delete(name)


def sweep(prefix: str = PREFIX) -> None:
    """Removes namespaces of processes that were killed, with what still runs inside."""
    for name in _names():
        owner = re.fullmatch(rf"{re.escape(prefix)}-(\d+)-\w+", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            _delete(name)


def _delete(name: str) -> None:
    # one that is in use lives on without a name
    with contextlib.suppress(subprocess.CalledProcessError):
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name)


def _names() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout
