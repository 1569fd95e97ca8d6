"""Hosts on a LAN of their own: network namespaces joined by a bridge, which nothing can leave."""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

_PREFIX = "gasloc-test"


def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program 'ip' (iproute2)"
    return ""


class Lan:
    """A switch with hosts 10.77.0.1, 10.77.0.2, ...; a `with` block, after which all of it is gone."""

    def __init__(self, hosts: int) -> None:
        self._stem = f"{_PREFIX}-{os.getpid()}"
        self._hosts = range(1, hosts + 1)

    def __enter__(self) -> Self:
        sweep()
        try:
            self._make(f"{self._stem}-switch")
            self._ip("switch", "link add lan type bridge")
            self._ip("switch", "link set lan up")
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
        return f"10.77.0.{number}"

    def inside(self, number: int) -> list[str]:
        """What to write before a command so that a host executes it."""
        return ["ip", "netns", "exec", f"{self._stem}-{number}"]

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
                with contextlib.suppress(subprocess.CalledProcessError):
                    _run("ip", "netns", "del", name)


def sweep() -> None:
    """Removes namespaces of test processes that were killed."""
    for name in _names():
        owner = re.fullmatch(rf"{_PREFIX}-(\d+)-\w+", name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", name)


def _names() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout


@contextlib.contextmanager
def lan(hosts: int) -> Iterator[Lan]:
    """A LAN, or a skipped test where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lan(hosts) as made:
        yield made
