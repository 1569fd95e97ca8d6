"""Hosts on a LAN for tests: see `benchmarks.namespaces`."""

import contextlib
from collections.abc import Iterator

import pytest

from benchmarks.namespaces import Lan, why_not

__all__ = ["Lan", "lan"]


@contextlib.contextmanager
def lan(hosts: int, network: str = "10.77.0") -> Iterator[Lan]:
    """A LAN, or a skipped test where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lan(hosts, network=network) as made:
        yield made
